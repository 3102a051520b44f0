"""Updates in bfloat16: their definition, their difference from float32, what stays float32."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from changed import changed
from ppo_agents import CPU, Episodes, act, collect
from ppo_agents import build as build_ppo
from torch import Tensor, nn

from steadyrl.agents.dqn.build import build_loss_spec
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.learner.precision import forward_in_precision
from tests.agents.dqn.test_agent import SETTINGS
from tests.agents.engine.test_inductor import network as q_network
from tests.agents.engine.test_inductor import random_batch

EIGHT_BITS = 2.0**-8


class Points(NamedTuple):
    x: Tensor
    y: Tensor


def squares(network, batch):
    return PerSampleLoss((network(batch.x).squeeze(1) - batch.y).square())


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def by_hand(batch):
    """Return the gradient of the loss with every layer's inputs and weights rounded to 8 bits."""
    module = layers()
    weights = list(module.parameters())
    one, two, three, four = (w.bfloat16() for w in weights)
    hidden = F.relu(F.linear(batch.x.bfloat16(), one, two))
    out = F.linear(hidden, three, four).float()
    loss = (out.squeeze(1) - batch.y).square().mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])


def test_named_outputs_keep_their_names_in_bf16():
    """A loss may read the outputs of its network by name, whatever the precision."""
    weight = torch.ones(4, 4)
    forward = forward_in_precision("bf16", lambda x: Points(x @ weight, x), CPU)
    found = forward(torch.ones(2, 4))
    assert isinstance(found, Points)
    assert found.x.dtype == found.y.dtype == torch.float32


def test_the_bf16_gradient_equals_that_of_rounded_layers():
    torch.manual_seed(1)
    batch = Points(torch.randn(32, 4), torch.randn(32))
    spec = LossSpec(loss=squares, metrics=(), max_grad_norm=0, grad_accumulation=1)
    found = {}
    for precision in ("float32", "bf16"):
        learner = Learner(spec, FlatNetwork(layers(), CPU), "direct")
        learner.set_precision(precision)
        learner.step(batch, 0.0)
        found[precision] = learner.network.gradient.clone()
    torch.testing.assert_close(found["bf16"], by_hand(batch), rtol=0, atol=0)
    assert not torch.equal(found["bf16"], found["float32"])
    scale = found["float32"].abs().max()
    assert ((found["bf16"] - found["float32"]).abs() < 8 * EIGHT_BITS * scale).all()
    assert found["bf16"].dtype == torch.float32


def dqn_weights(precision, mode="direct", **changes):
    settings = changed(SETTINGS, **changes)
    online, target = (q_network(seed, settings, CPU) for seed in (0, 1))
    learner = Learner(build_loss_spec(settings), online, mode, frozen=(target,))
    learner.set_precision(precision)
    g = torch.Generator().manual_seed(3)
    n = settings.batch_size
    for _ in range(5):
        (td_error,) = learner.step(random_batch(n, g), 1e-3)
    assert td_error.dtype == online.weights.dtype == torch.float32
    return online.weights


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dueling": True, "distribution__kind": "c51"},
        {"distribution__kind": "quantile", "munchausen__enabled": True},
    ],
)
def test_dqn_in_bf16_learns_nearly_the_same_as_in_float32(changes):
    plain, again = dqn_weights("float32", **changes), dqn_weights("tf32", **changes)
    bf16 = dqn_weights("bf16", **changes)
    assert torch.equal(plain, again)  # TF32 exists on GPUs only
    assert not torch.equal(plain, bf16)
    # Adam's steps are about as large as the learning rate, whatever the gradient.
    assert (plain - bf16).abs().max() <= 2 * 5 * 1e-3
    assert (plain - bf16).abs().mean() < 1e-3


@pytest.mark.slow
def test_compiled_bf16_updates_round_no_more_than_eager_ones():
    direct, compiled = (dqn_weights("bf16", mode) for mode in ("direct", "compiled"))
    plain = dqn_weights("float32", "compiled")
    # Compilers round between layers only, and Adam normalises gradients of any size.
    assert (direct - compiled).abs().max() <= 2 * 5 * 1e-3
    # They round at different places, so they may differ more from each other than from float32.
    rounded, graph_rounded = ((weights - plain).abs().mean() for weights in (direct, compiled))
    assert 0 < graph_rounded < 1.5 * rounded < 1e-3


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_ppo_in_bf16_learns_nearly_the_same_as_in_float32(recurrent):
    final_weights = []
    for precision in ("float32", "bf16"):
        agent, env = build_ppo(epochs=1, minibatches=1, recurrent__cell=recurrent), Episodes()
        agent.set_precision(precision)
        collect(agent, env, env.reset(), 16)
        metrics = agent.update()
        kl = dict(zip(metrics.names, metrics.values.tolist(), strict=True))["train/approx_kl"]
        final_weights.append(agent._learner.network.weights)
        if recurrent == "none":
            assert abs(kl) < 1e-7, "the first ratio is 1"
    assert not torch.equal(*final_weights)
    assert (final_weights[0] - final_weights[1]).abs().max() <= 2 * 1e-3


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_all_values_of_a_rollout_have_the_same_precision(recurrent):
    """With obs[T] = obs[T − 1], the bootstrap value V(obs[T]) equals value[T − 1].

    A recurrent network has another hidden state by then: compare with what the update computes.
    """
    agent, env = build_ppo(epochs=1, minibatches=1, recurrent__cell=recurrent), Episodes()
    agent.set_precision("bf16")
    collect(agent, env, env.reset(), 15)
    obs = env.reset()
    decision, step = act(agent, obs), env.step()
    agent.observe(decision, step._replace(obs=obs))
    found, rollout = [], agent._rollout
    finish = rollout.compute_advantages
    rollout.compute_advantages = lambda last, **how: (
        found.append(last.clone()) or finish(last, **how)
    )
    agent._compute_targets()
    if recurrent == "none":
        expected = rollout.value[-2]
    else:
        hidden_state = agent._actor.hidden_state * rollout.flags[-1, -1].view(-1, 1, 1)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            expected = agent._learner.network.module(torch.from_numpy(obs), hidden_state)[1].float()
    assert torch.equal(found[0], expected)
    stored = rollout.value[:-1].flatten()[rollout.valid_indices]
    for values in (found[0], stored):
        assert torch.equal(values, values.bfloat16().float()), "of 8 bits"
