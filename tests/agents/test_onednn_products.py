"""What oneDNN multiplies in a graph is the product, whatever order the matrices are in."""

import pytest
import torch
from test_tracing import targets

from agents import onednn_products
from agents.kept_graphs import host_code
from agents.onednn_products import faster_here, operator, pays
from agents.tracing import traced

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="oneDNN is not part of this torch"
)
LARGE = torch.zeros(64, 256), torch.zeros(256, 256)


@pytest.fixture
def everywhere(monkeypatch, tmp_path):
    """Multiply by oneDNN on any processor, and keep no graph of it."""
    monkeypatch.setattr(onednn_products, "faster_here", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def network(x, goal, w, b, v, twins, shift):
    """Return a loss whose gradient has products of every kind: as they are, turned, in pairs."""
    h = torch.addmm(b, x, w.t()).relu()
    y = torch.baddbmm(shift, h.expand(2, *h.shape), twins).tanh()
    return ((y[0] + y[1] @ v - goal) ** 2).mean()


def arguments():
    g = torch.Generator().manual_seed(0)
    shapes = (64, 200), (64, 160), (160, 200), (160,), (160, 160), (2, 160, 160), (2, 1, 160)
    return tuple(torch.randn(shape, generator=g) / 10 for shape in shapes)


def slopes(*given):
    loss = torch.func.grad_and_value(network, argnums=(2, 3, 4, 5, 6))
    gradients, value = loss(*given)
    return (*gradients, value)


@needs_onednn
def test_gradients_are_those_of_exact_products(everywhere):
    given = arguments()
    graph, captured = traced(slopes, given)
    assert not captured and operator() in targets(graph)
    assert not {torch.ops.aten.addmm.default, torch.ops.aten.bmm.default} & targets(graph)
    run = host_code(graph, list(given))
    exact = slopes(*(part.double() for part in given))
    for found, again, expected in zip(run(list(given)), run(list(given)), exact, strict=True):
        assert torch.equal(found, again)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@needs_onednn
def test_a_matrix_that_is_added_is_no_bias(everywhere):
    given = (torch.ones(64, 256), *LARGE)
    graph, _ = traced(torch.addmm, given)
    assert torch.equal(graph(*given), torch.ones(64, 256))


def test_small_products_and_other_numbers_stay_with_torch(everywhere):
    left, right = LARGE
    assert pays(left, right)
    assert not pays(left[:8], right)
    assert not pays(left.double(), right.double())
    assert not pays(left.bfloat16(), right.bfloat16())


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_only_what_mkl_does_not_use_is_won(tmp_path, monkeypatch, vendor, capability, expected):
    processor = tmp_path / "cpuinfo"
    if vendor is not None:
        processor.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(onednn_products, "PROCESSOR", processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(library, "is_available", lambda: True)
    assert faster_here.__wrapped__() is expected
