"""What private names of torch do, as far as it is relied on."""

from __future__ import annotations

import inspect

import torch

from steadyrl.core.gates.torch_private import COMPILER, MODE, TORCH, fused_adam, run_backward


def test_fused_adam_equals_the_optimizer():
    step = fused_adam()
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
    backward = run_backward()
    weights = torch.randn(5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    output_gradient = torch.linspace(0.1, 0.5, 5)
    weights.square().backward(output_gradient)
    expected = weights.grad + 1
    weights.grad = torch.ones(5)
    backward((weights.square(),), (output_gradient,), False, False, (), True, True)
    assert torch.equal(weights.grad, expected)


def test_a_dispatch_mode_sees_operations_below_autograd():
    seen = []

    class Seeing(TORCH[MODE]):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def function(x):
        return torch.func.grad(lambda y: (y * y).sum())(x)

    with Seeing():
        found = function(torch.full((3,), 5.0))
    assert found.tolist() == [10.0] * 3
    assert torch.ops.aten.mul.Tensor in seen


def test_the_compiler_takes_a_graph_and_its_inputs():
    parameters = list(inspect.signature(TORCH[f"{COMPILER}.compile"]).parameters)
    assert parameters[:2] == ["gm", "example_inputs"]
