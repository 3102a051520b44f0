"""Traced graphs compute what their functions compute."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.agents.engine.graphs import wide_products
from steadyrl.agents.engine.graphs.trace import FEW, NARROW, SHORT, trace
from steadyrl.agents.learner.optimizers.adam import once


@pytest.fixture(scope="module", autouse=True)
def on_most_processors():
    """Use library products on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide_products, "faster_here", lambda: False)
        yield


SIDES = st.sampled_from([1, NARROW, NARROW + 1, FEW, FEW + 1, 40])


def targets(graph):
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


@settings(deadline=None, max_examples=25)
@given(SIDES, SIDES, SIDES, st.booleans(), st.booleans())
def test_traced_products_are_equal_and_bias_is_a_separate_sum(
    rows, inner, columns, left_t, right_t
):
    g = torch.Generator().manual_seed(rows * 10_000 + inner * 100 + columns)
    left = torch.randn((inner, rows) if left_t else (rows, inner), generator=g)
    right = torch.randn((columns, inner) if right_t else (inner, columns), generator=g)
    bias = torch.randn(columns, generator=g)

    def both(left, right, bias):
        left, right = left.t() if left_t else left, right.t() if right_t else right
        return left @ right, torch.addmm(bias, left, right)

    graph, captured = trace(both, (left, right, bias))
    assert captured == []
    assert torch.ops.aten.addmm.default not in targets(graph)
    for found, expected in zip(graph(left, right, bias), both(left, right, bias), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), SIDES, st.sampled_from([1, SHORT, SHORT + 1, 40]), SIDES)
def test_traced_batched_products_are_equal_and_bias_is_a_separate_sum(pairs, rows, inner, columns):
    g = torch.Generator().manual_seed(rows * 10_000 + inner * 100 + columns)
    left = torch.randn((pairs, rows, inner), generator=g)
    right = torch.randn((pairs, inner, columns), generator=g)
    bias = torch.randn((pairs, 1, columns), generator=g)

    def both(left, right, bias):
        return torch.bmm(left, right), torch.baddbmm(bias, left, right)

    graph, _ = trace(both, (left, right, bias))
    for found, expected in zip(graph(left, right, bias), both(left, right, bias), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.ops.aten.baddbmm.default not in targets(graph)
    assert (torch.ops.aten.bmm.default in targets(graph)) is (inner > SHORT)


@pytest.mark.parametrize(
    ("shape", "library"),
    [((128, 84, NARROW), False), ((120, 128, FEW), True), ((64, 64, 64), True)],
)
def test_only_narrow_products_become_sums(shape, library):
    rows, inner, columns = shape
    graph, _ = trace(torch.mm, (torch.zeros(rows, inner), torch.zeros(inner, columns)))
    assert (torch.ops.aten.mm.default in targets(graph)) is library


def test_strided_products_stay_library_calls():
    # A layer of two inputs: its weights are stored transposed, and so are its output gradients.
    inputs, weights, gradients = torch.zeros(128, 2), torch.zeros(256, 2), torch.zeros(128, 256)
    forward, _ = trace(lambda x, w: x @ w.t(), (inputs, weights))
    assert torch.ops.aten.mm.default in targets(forward)
    backward, _ = trace(lambda g, x: g.t() @ x, (gradients, inputs))
    assert torch.ops.aten.mm.default not in targets(backward)
    [terms] = [n for n in backward.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    assert terms.meta["val"].shape == (2, 128, 256)  # last axis: that of the gradients
    as_it_lies, _ = trace(torch.mm, (gradients[:, :2].contiguous(), weights.t().contiguous()))
    assert torch.ops.aten.mm.default not in targets(as_it_lies)


def test_products_with_few_columns_are_transposed():
    graph, _ = trace(torch.mm, (torch.zeros(120, 128), torch.zeros(128, FEW)))
    order = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert order == ["aten.t.default", "aten.t.default", "aten.mm.default", "aten.t.default"]


def test_once_returns_its_argument():
    for number in (0.1, -3.0, float("inf")):
        assert once(torch.tensor(number)).item() == torch.tensor(number).item()
    assert once(torch.tensor(float("nan"))).isnan()


def test_in_place_operations_and_views_are_traced():
    def function(x, y):
        low, high = (x * 2).sort(0)[0].chunk(2)
        total = torch.zeros(()).add_(low.sum()).mul_(3)
        y.add_(high)
        return total, y.clone(), (x > 0).sum()

    inputs = torch.tensor([4.0, -1.0, 3.0, 2.0]), torch.ones(2)
    graph, captured = trace(function, inputs)
    assert captured == []
    assert inputs[1].tolist() == [1.0, 1.0]  # traced on copies
    for x in (torch.arange(4.0), torch.tensor([5.0, 7.0, -6.0, 0.5])):
        mine, other = torch.ones(2), torch.ones(2)
        for found, expected in zip(graph(x, mine), function(x, other), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(mine, other)


def test_captured_tensors_become_inputs():
    scale = torch.tensor([2.0, 3.0])
    graph, captured = trace(lambda x: x * scale + scale.sum(), (torch.ones(2),))
    assert len(captured) == 1 and captured[0] is scale
    assert graph(torch.ones(2), torch.tensor([10.0, 20.0])).tolist() == [40.0, 50.0]


def test_untraced_intermediate_tensors_are_rejected():
    weight = torch.ones(2, requires_grad=True)
    computed = weight * 2
    with pytest.raises(RuntimeError, match="did not see"):
        trace(lambda x: x * computed, (torch.ones(2),))


def test_tracing_imports_no_compiler():
    code = (
        "import sys, torch\nfrom steadyrl.agents.engine.graphs.trace import trace\n"
        "def slope(x):\n"
        "    y = x.detach().requires_grad_()\n"
        "    return torch.autograd.grad((y @ y).tanh(), y)\n"
        "trace(slope, (torch.ones(2),))\n"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[4])


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "graphs"),  # of updates; PPO's rollouts are evaluated by another
    [
        pytest.param("experiment=minatar_breakout_ppo", 2, marks=pytest.mark.slow),
        ("experiment=cartpole_dqn", 1),
    ],
)
def test_cached_graphs_import_no_compiler(tmp_path, overrides, graphs):
    if "minatar" in overrides:
        pytest.importorskip("minatar")
    code = f"""
import sys
from steadyrl.agents.engine.graphs import graph_cache
from steadyrl.loop import train
from steadyrl.training.run.job import accept, compose_one
loaded, load = [], graph_cache._load
graph_cache._load = lambda library: loaded.append(library) or load(library)
overrides = [{overrides!r}, "total_steps=1100", "agent.compile=true", "eval.every=0", "device=cpu"]
overrides += ["run_dir=" + sys.argv[1]]
train(accept(compose_one(overrides), overrides))
print(len(loaded), *(name in sys.modules for name in ("torch._dynamo", "torch._inductor", "sympy")))
"""
    for name in ("first", "second"):  # the first compiles, unless an earlier run did
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        options = {"cwd": Path(__file__).parents[4], "check": True}
        done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.stdout.splitlines()[-1] == f"{graphs} False False False"
