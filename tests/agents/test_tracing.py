"""Graphs compute what the functions do that they were made of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.tracing import FEW, NARROW, SHORT, once, traced

SIDES = st.sampled_from([1, NARROW, NARROW + 1, FEW, FEW + 1, 40])


def targets(graph):
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


@settings(deadline=None, max_examples=25)
@given(SIDES, SIDES, SIDES, st.booleans(), st.booleans())
def test_products_are_the_same_and_the_library_adds_no_bias(rows, inner, columns, left_t, right_t):
    g = torch.Generator().manual_seed(rows * 10_000 + inner * 100 + columns)
    left = torch.randn((inner, rows) if left_t else (rows, inner), generator=g)
    right = torch.randn((columns, inner) if right_t else (inner, columns), generator=g)
    bias = torch.randn(columns, generator=g)

    def both(left, right, bias):
        left, right = left.t() if left_t else left, right.t() if right_t else right
        return left @ right, torch.addmm(bias, left, right)

    graph, captured = traced(both, (left, right, bias))
    assert captured == []
    assert torch.ops.aten.addmm.default not in targets(graph)
    for found, expected in zip(graph(left, right, bias), both(left, right, bias), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), SIDES, st.sampled_from([1, SHORT, SHORT + 1, 40]), SIDES)
def test_products_of_pairs_are_the_same_and_the_library_adds_no_bias(pairs, rows, inner, columns):
    g = torch.Generator().manual_seed(rows * 10_000 + inner * 100 + columns)
    left = torch.randn((pairs, rows, inner), generator=g)
    right = torch.randn((pairs, inner, columns), generator=g)
    bias = torch.randn((pairs, 1, columns), generator=g)

    def both(left, right, bias):
        return torch.bmm(left, right), torch.baddbmm(bias, left, right)

    graph, _ = traced(both, (left, right, bias))
    for found, expected in zip(graph(left, right, bias), both(left, right, bias), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.ops.aten.baddbmm.default not in targets(graph)
    assert (torch.ops.aten.bmm.default in targets(graph)) is (inner > SHORT)


@pytest.mark.parametrize(
    ("shape", "library"),
    [((128, 84, NARROW), False), ((120, 128, FEW), True), ((64, 64, 64), True)],
)
def test_only_very_narrow_products_are_written_out(shape, library):
    rows, inner, columns = shape
    graph, _ = traced(torch.mm, (torch.zeros(rows, inner), torch.zeros(inner, columns)))
    assert (torch.ops.aten.mm.default in targets(graph)) is library


def test_no_loop_jumps_from_row_to_row():
    # A layer of two inputs: its weights lie transposed, and so do the slopes of what it gives.
    inputs, weights, slopes = torch.zeros(128, 2), torch.zeros(256, 2), torch.zeros(128, 256)
    forward, _ = traced(lambda x, w: x @ w.t(), (inputs, weights))
    assert torch.ops.aten.mm.default in targets(forward)
    backward, _ = traced(lambda g, x: g.t() @ x, (slopes, inputs))
    assert torch.ops.aten.mm.default not in targets(backward)
    [terms] = [n for n in backward.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    assert terms.meta["val"].shape == (2, 128, 256)  # whose last axis is that of the slopes
    as_it_lies, _ = traced(torch.mm, (slopes[:, :2].contiguous(), weights.t().contiguous()))
    assert torch.ops.aten.mm.default not in targets(as_it_lies)


def test_few_columns_are_computed_transposed():
    graph, _ = traced(torch.mm, (torch.zeros(120, 128), torch.zeros(128, FEW)))
    order = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert order == ["aten.t.default", "aten.t.default", "aten.mm.default", "aten.t.default"]


def test_once_is_the_number_itself():
    for number in (0.1, -3.0, float("inf")):
        assert once(torch.tensor(number)).item() == torch.tensor(number).item()
    assert once(torch.tensor(float("nan"))).isnan()
