"""The private names of torch in use: a failing test names the one that moved."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

# (module, name) → the file that uses it
PRIVATE = {
    ("torch", "_fused_adam_"): "agents/learner/adam.py",
    ("torch.autograd", "Variable"): "agents/learner/learner.py",
    ("torch._C._aoti", "AOTIModelContainerRunnerCpu"): "agents/engine/graphs/graph_cache.py",
    ("torch._inductor", "aot_compile"): "agents/engine/graphs/graph_cache.py",
    ("torch._inductor", "compile"): "agents/engine/inductor.py",
    (
        "torch.utils._python_dispatch",
        "_get_current_dispatch_mode",
    ): "agents/networks/activations.py",
    ("torch.utils._python_dispatch", "TorchDispatchMode"): "agents/engine/graphs/trace.py",
    ("torch.utils.weak", "WeakTensorKeyDictionary"): "agents/engine/graphs/trace.py",
}


def private(module, name):
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        user = PRIVATE[module, name]
        pytest.fail(f"torch {torch.__version__} has no {module}.{name} any more: see {user}")


@pytest.mark.parametrize(("module", "name"), PRIVATE)
def test_private_names_of_torch_exist(module, name):
    assert callable(private(module, name))


def test_the_list_covers_the_private_names_in_use():
    root = __file__.rpartition("tests")[0]
    for (module, name), user in PRIVATE.items():
        with open(root + user) as file:
            text = file.read()
        assert module in text and name in text, (module, name, user)


def test_fused_adam_equals_the_optimizer():
    step = private("torch", "_fused_adam_")
    rng = torch.Generator().manual_seed(0)
    ours = torch.randn(7, generator=rng)
    theirs = ours.clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=0.01, eps=1e-5)
    mean, square, count = torch.zeros(7), torch.zeros(7), torch.zeros(())
    for _ in range(3):
        gradient = torch.randn(7, generator=rng)
        theirs.grad = gradient.clone()
        adam.step()
        count += 1
        step(
            [ours], [gradient], [mean], [square], [], [count],
            lr=torch.tensor(0.01), beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-5,
            amsgrad=False, maximize=False,
        )  # fmt: skip
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)


def test_the_autograd_engine_accumulates_like_backward():
    engine = private("torch.autograd", "Variable")._execution_engine
    weights = torch.randn(5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    output_gradient = torch.linspace(0.1, 0.5, 5)
    weights.square().backward(output_gradient)
    expected = weights.grad + 1
    weights.grad = torch.ones(5)
    engine.run_backward((weights.square(),), (output_gradient,), False, False, (), True, True)
    assert torch.equal(weights.grad, expected)


def test_modules_store_parameters_by_name():
    """`agents/networks/encoders.py` reads `_parameters` directly, without `__getattr__`."""
    layer = torch.nn.Linear(2, 3)
    assert layer._parameters == {"weight": layer.weight, "bias": layer.bias}
    others = {name: torch.full_like(parameter, 2) for name, parameter in layer.named_parameters()}
    seen = []
    layer.forward = lambda: seen.append(dict(layer._parameters))
    torch.func.functional_call(layer, others, ())
    assert [*seen[0].values()] == [*others.values()]


def test_a_dispatch_mode_sees_operations_below_autograd():
    where = "torch.utils._python_dispatch"
    mode, current = (
        private(where, "TorchDispatchMode"),
        private(where, "_get_current_dispatch_mode"),
    )
    seen, modes = [], []

    class Seeing(mode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def function(x):
        modes.append(current())
        return torch.func.grad(lambda y: (y * y).sum())(x)

    with Seeing():
        found = function(torch.full((3,), 5.0))
    assert current() is None
    assert isinstance(modes[0], Seeing)
    assert found.tolist() == [10.0] * 3
    assert torch.ops.aten.mul.Tensor in seen


def test_the_compiler_takes_a_graph_and_its_inputs():
    parameters = list(inspect.signature(private("torch._inductor", "compile")).parameters)
    assert parameters[:2] == ["gm", "example_inputs"]
