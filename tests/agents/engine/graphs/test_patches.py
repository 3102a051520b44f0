"""Graphs that compute convolutions as products of patches equal the convolutions."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from steadyrl.agents.engine.graphs import patches
from steadyrl.agents.engine.graphs.graph_cache import host_code
from steadyrl.agents.engine.graphs.trace import trace
from tests.agents.engine.graphs.test_trace import targets
from tests.agents.engine.graphs.test_wide_products import everywhere, needs_avx512  # noqa: F401

CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default


def conv_inputs(rows=64, channels=4, filters=16, board=(10, 9), side=(3, 2)):
    g = torch.Generator().manual_seed(0)
    shapes = (rows, channels, *board), (filters, channels, *side), (filters,)
    return tuple(torch.randn(shape, generator=g) for shape in shapes)


def gradients(x, weight, bias, **options):
    weight, bias = weight.detach().requires_grad_(), bias.detach().requires_grad_()
    with torch.enable_grad():
        y = F.conv2d(x, weight, bias, **options).relu().flatten(1)
        loss = (y @ torch.linspace(-1, 1, y.shape[1], dtype=y.dtype)).square().mean()
        return *torch.autograd.grad(loss, (weight, bias)), y.detach()


SHAPES = ({}, {"channels": 1, "rows": 200}, {"board": (3, 9)}, {"rows": 1})


def cases():
    """Return the inputs of every shape, in both memory formats."""
    found = []
    for shape in SHAPES:
        x, weight, bias = conv_inputs(**shape)
        found.append((x, weight, bias))
        found.append((x.contiguous(memory_format=torch.channels_last), weight, bias))
    return found


def assert_exact(found, inputs):
    exact = gradients(*(part.double() for part in inputs))
    for mine, other in zip(found, exact, strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-4)


@needs_avx512
@pytest.mark.parametrize("inputs", cases())
@pytest.mark.usefixtures("everywhere")
def test_patch_products_equal_convolutions_forward_and_backward(inputs):
    graph, captured = trace(gradients, inputs)
    assert captured == []
    assert not {CONVOLUTION, BACKWARD} & targets(graph)
    order = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert order.count(torch.ops.aten.as_strided.default) == 1  # patches are extracted once
    assert_exact(graph(*inputs), inputs)


@pytest.mark.long
@needs_avx512
@pytest.mark.usefixtures("everywhere")
def test_compiled_patch_products_equal_convolutions():
    """All shapes in one graph, because each compilation takes seconds."""
    flat = tuple(part for inputs in cases() for part in inputs)

    def each(*parts):
        return tuple(
            out for at in range(0, len(parts), 3) for out in gradients(*parts[at : at + 3])
        )

    graph, _ = trace(each, flat)
    found = host_code(graph, list(flat))(list(flat))
    for at, inputs in enumerate(cases()):
        assert_exact(found[3 * at : 3 * at + 3], inputs)


@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 2}])
@pytest.mark.usefixtures("everywhere")
def test_unsupported_convolutions_are_unchanged(options):
    x, weight, bias = conv_inputs()
    weight = weight[:, ::2] if "groups" in options else weight
    graph, _ = trace(lambda *each: gradients(*each, **options), (x, weight, bias))
    assert {CONVOLUTION, BACKWARD} <= targets(graph)


@pytest.mark.usefixtures("everywhere")
def test_large_batches_and_other_dtypes_are_unchanged(monkeypatch):
    double = tuple(part.double() for part in conv_inputs())
    assert {CONVOLUTION, BACKWARD} <= targets(trace(gradients, double)[0])
    monkeypatch.setattr(patches, "MOST_BYTES", 1000)
    assert {CONVOLUTION, BACKWARD} <= targets(trace(gradients, conv_inputs())[0])


@pytest.mark.usefixtures("everywhere")
def test_input_gradients_are_left_to_the_convolution():
    x, weight, bias = conv_inputs()
    second = torch.randn(16, 16, 3, 3, generator=torch.Generator().manual_seed(1))

    def twice(x, weight, bias, second):
        weight = weight.detach().requires_grad_()
        with torch.enable_grad():
            y = F.conv2d(F.conv2d(x, weight, bias).relu(), second)
            return torch.autograd.grad(y.square().mean(), weight)[0]

    graph, _ = trace(twice, (x, weight, bias, second))
    assert BACKWARD in targets(graph)
    assert CONVOLUTION not in targets(graph)
    torch.testing.assert_close(
        graph(x, weight, bias, second), twice(x, weight, bias, second), rtol=1e-4, atol=1e-5
    )
