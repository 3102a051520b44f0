"""PPO's loss and gradient against an oracle in NumPy float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from changed import changed
from ppo_agents import CPU, SETTINGS, act, build
from torch import nn

from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import BoxHead, DiscreteHead
from steadyrl.agents.ppo.advantages import explained_variance
from steadyrl.agents.ppo.build import build_loss_spec
from steadyrl.agents.ppo.loss import (
    normalize_advantage,
    policy_loss,
)
from steadyrl.agents.ppo.minibatches import normalize_by_moments
from steadyrl.buffers.rollout.buffer import RolloutBatch
from steadyrl.envs.types import Step
from tests.agents.learner.test_learner import as_traced


def numpy_loss(w, batch, s, clip, box):
    """PPO on a one-layer network, straight from the paper; returns the loss and its parts."""
    obs, action, old_log_prob, old_value, adv, ret = (x.numpy().astype(np.float64) for x in batch)
    h = [np.tanh(obs @ w["trunk.layers.0.weight"][k] + w["trunk.layers.0.bias"][k]) for k in (0, 1)]
    value = h[1] @ w["value.weight"][0] + w["value.bias"][0]
    layer = "policy.mean" if box else "policy"
    out = h[0] @ w[f"{layer}.weight"].T + w[f"{layer}.bias"]
    if box:
        sigma = np.exp(w["policy.log_std"])
        z = (action - out) / sigma
        log_prob = (-0.5 * z**2 - np.log(sigma) - 0.5 * np.log(2 * np.pi)).sum(1)
        entropy = np.full(len(obs), (0.5 * np.log(2 * np.pi * np.e * sigma**2)).sum())
    else:
        log_p = out - np.log(np.exp(out).sum(1, keepdims=True))
        log_prob = log_p[np.arange(len(obs)), action.astype(int)]
        entropy = -(np.exp(log_p) * log_p).sum(1)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    ratio = np.exp(log_prob - old_log_prob)
    policy = -np.minimum(ratio * adv, np.clip(ratio, 1 - clip, 1 + clip) * adv).mean()
    squares = (value - ret) ** 2
    if s.clip_value:
        clipped = old_value + np.clip(value - old_value, -clip, clip)
        squares = np.maximum(squares, (clipped - ret) ** 2)
    kl = (ratio - 1 - (log_prob - old_log_prob)).mean()
    fraction = (np.abs(ratio - 1) > clip).mean()
    loss = policy + s.value_coef * squares.mean() - s.entropy_coef * entropy.mean()
    return loss, policy, squares.mean(), entropy.mean(), kl, fraction


def numpy_gradient(w, *rest):
    """Differentiate numpy_loss by central differences."""
    gradient = {name: np.zeros_like(x) for name, x in w.items()}
    for name, x in w.items():
        for i in np.ndindex(x.shape):
            keep = x[i]
            sides = []
            for step in (1e-6, -1e-6):
                x[i] = keep + step
                sides.append(numpy_loss(w, *rest)[0])
            x[i] = keep
            gradient[name][i] = (sides[0] - sides[1]) / 2e-6
    return gradient


def setting(box=False, samples=24, seed=0, **changes):
    """A perturbed network, and a batch of a different old policy."""
    generator = torch.Generator().manual_seed(seed)
    head = BoxHead(2) if box else DiscreteHead(3)
    s = changed(SETTINGS, hidden=(5,), max_grad_norm=0.0, **changes)
    net = ActorCritic(
        (4,), "float32", head, hidden=s.hidden, network=s.network, shared=False, normalise=False,
        log_std=-0.3,
    )  # fmt: skip
    net.reset_parameters(generator)
    flat = FlatNetwork(net, CPU)
    flat.weights.add_(torch.randn(flat.weights.shape, generator=generator) * 0.3)
    obs = torch.randn(samples, 4, generator=generator)
    with torch.no_grad():
        parameters, value = net(obs)
        noise = head.draw_(torch.empty(samples, *head.noise_shape), generator)
        action = head.sample(parameters, noise)
        log_prob = head.log_prob(parameters, action)
    normal = [torch.randn(samples, generator=generator) for _ in range(4)]
    batch = RolloutBatch(
        obs, action, log_prob + 0.3 * normal[0], value + 0.3 * normal[1], normal[2], normal[3]
    )
    return s, flat, head, batch


def step(learner, batch, learning_rate, clip):
    """Take a step; return the loss, its parts and the norm of the gradient."""
    learner.step(batch, learning_rate, clip)
    return learner.means().values


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("clip_value", [False, True])
def test_loss_parts_and_gradient_equal_the_numpy_oracle(box, clip_value):
    s, flat, head, batch = setting(box, clip_value=clip_value, entropy_coef=0.1)
    learner = Learner(build_loss_spec(s, head, len(batch.obs)), flat, "direct")
    w = {n: v.double().numpy().copy() for n, v in flat.views(flat.weights).items()}
    expected = numpy_loss(w, batch, s, 0.2, box)
    assert 0.1 < expected[-1] < 0.9, "some samples must be clipped and some not"
    gradient = numpy_gradient(w, batch, s, 0.2, box)
    metrics = step(learner, batch, 0.0, 0.2)
    np.testing.assert_allclose(metrics[:6].numpy(), expected, rtol=1e-5, atol=1e-6)
    for name, truth in gradient.items():
        ours = flat.views(flat.gradient)[name].numpy()
        np.testing.assert_allclose(ours, truth, rtol=1e-4, atol=1e-6, err_msg=name)
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    assert metrics[-2].item() == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip_value", [False, True])
def test_steps_equal_torch_adam_on_clipped_gradients(accumulate, clip_value):
    changes = {"clip_value": clip_value, "entropy_coef": 0.01, "grad_accumulation": accumulate}
    s, flat, head, batch = setting(**changes)
    s = replace(s, max_grad_norm=0.1)
    _, reference, _, _ = setting(**changes)
    learner = Learner(build_loss_spec(s, head, 24), flat, "direct")
    optimizer = torch.optim.Adam(reference.module.parameters(), lr=1e-2, eps=1e-5)
    advantage = (batch.advantage - batch.advantage.mean()) / batch.advantage.std(correction=0)
    for _ in range(10):
        reference.gradient.zero_()
        samples = build_loss_spec(s, head, 24).loss(
            reference.module, batch._replace(advantage=advantage), 0.2
        )
        samples.loss.mean().backward()
        norm = nn.utils.clip_grad_norm_(reference.module.parameters(), 0.1)
        optimizer.step()
        metrics = step(learner, batch, 1e-2, 0.2)
        assert metrics[0].item() == pytest.approx(samples.loss.mean().item(), abs=1e-5)
        assert metrics[-2].item() == pytest.approx(norm.item(), rel=1e-4)
    assert norm > 0.1, "something was clipped"
    torch.testing.assert_close(flat.weights, reference.weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("samples", [24, 23, 7])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_microbatches_add_up_to_the_batch_gradient(samples, count):
    gradients = []
    for k in (1, count):
        s, flat, head, batch = setting(samples=samples, grad_accumulation=k)
        learner = Learner(build_loss_spec(s, head, samples), flat, "direct")
        metrics = step(learner, batch, 0.0, 0.2)
        gradients.append((flat.gradient.clone(), metrics))
    for one_batch, microbatches in zip(*gradients, strict=True):
        torch.testing.assert_close(microbatches, one_batch, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("samples", [24, 17])
@pytest.mark.parametrize("count", [1, 3])
def test_the_traced_function_takes_the_same_step(samples, count):
    """The traced function is run uncompiled; padding to 24 samples changes nothing."""
    results = []
    for mode in ("direct", "graph"):
        s, flat, head, batch = setting(samples=samples, grad_accumulation=count, target_kl=1.0)
        learner = Learner(
            build_loss_spec(s, head, 24), flat, "direct" if mode == "direct" else "compiled"
        )
        if mode == "graph":
            as_traced(learner)
        for _ in range(3):
            metrics = step(learner, batch, 1e-2, 0.2)
        results.append((flat.weights, metrics, *learner.optimizer_state))
    for direct, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, direct, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["eager", "graph"])
def test_the_entropy_coefficient_may_change_with_every_step(as_tensor):
    """Passed to a step as a number or a tensor, it equals a fixed coefficient."""
    s, flat, head, batch = setting(entropy_coef=0.1)
    fixed = build_loss_spec(s, head, 24).loss
    varying = build_loss_spec(replace(s, anneal_entropy_coef="cosine"), head, 24).loss
    for coef in (0.1, 0.3, 0.0):
        known = fixed.keywords | {"entropy_coef": coef}
        expected = fixed.func(flat.module, batch, 0.2, **known).loss
        coef_ = torch.tensor(coef) if as_tensor else coef
        found = varying(flat.module, batch, 0.2, coef_).loss
        torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match="entropy_coef"):
        varying(flat.module, batch, 0.2)


@pytest.mark.slow
def test_the_compiled_graph_takes_the_same_step(caplog):
    results = []
    for mode in ("direct", "compiled"):
        s, flat, head, batch = setting()
        learner = Learner(build_loss_spec(s, head, 24), flat, mode)
        for k in range(5):
            metrics = step(learner, batch, 1e-2 / (k + 1), 0.2)
        results.append((flat.weights, metrics))
    for direct, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, direct, atol=1e-5, rtol=1e-4)
    assert "running eagerly" not in caplog.text


def test_a_step_that_exceeds_the_target_kl_is_undone():
    s, flat, head, batch = setting(target_kl=1e-6)
    learner = Learner(build_loss_spec(s, head, 24), flat, "direct")
    before = flat.weights.clone()
    learner.step(batch, 1e-2, 0.2)
    assert learner.limit_exceeded
    assert torch.equal(flat.weights, before)
    assert learner.optimizer_state.step == learner.updates == 0


def test_a_step_within_the_target_kl_is_taken():
    s, flat, head, batch = setting(target_kl=10.0)
    learner = Learner(build_loss_spec(s, head, 24), flat, "direct")
    before = flat.weights.clone()
    step(learner, batch, 1e-2, 0.2)
    assert not learner.limit_exceeded
    assert not torch.equal(flat.weights, before)


def test_the_gradient_is_clipped_as_a_whole():
    s, flat, head, batch = setting()
    learner = Learner(build_loss_spec(replace(s, max_grad_norm=0.05), head, 24), flat, "direct")
    norm = step(learner, batch, 0.0, 0.2)[-1]
    assert norm > 0.05
    assert flat.gradient.norm().item() == pytest.approx(0.05, rel=1e-4)


def test_the_clipped_surrogate_equals_equation_7():
    generator = torch.Generator().manual_seed(0)
    ratio = (torch.randn(1000, generator=generator) * 0.5).exp()
    advantage = torch.randn(1000, generator=generator)
    paper = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(policy_loss(ratio, advantage, 0.2), paper)


def test_advantages_are_normalised_over_samples_with_weight():
    advantage = torch.tensor([1.0, 2.0, 3.0, 99.0])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0]) / 3
    expected = torch.tensor([-1.0, 0.0, 1.0]) * 1.5**0.5
    torch.testing.assert_close(normalize_advantage(advantage, weight)[:3], expected)
    assert normalize_advantage(torch.tensor([5.0]), torch.ones(1)) == 0


@pytest.mark.parametrize("count", [2, 3, 10, 48, 341, 1000])
@pytest.mark.parametrize("value", [0.1, 0.7, -100.0, 1e8, 1e30])
def test_equal_advantages_are_no_advantage(count, value):
    advantage, weight = torch.full((count,), value), torch.full((count,), 1 / count)
    assert not normalize_advantage(advantage, weight).any()
    own = advantage.double()
    found = normalize_by_moments(advantage, count, own.sum().item(), own.square().sum().item())
    assert found.abs().max() < 1e-3


@pytest.mark.parametrize(
    ("mean", "std"), [(1e4, 0.01), (-1e3, 0.1), (0, 1e15), (1e6, 1), (0, 1e-9)]
)
def test_advantages_are_normalised_at_any_scale(mean, std):
    advantage = mean + std * torch.randn(48, generator=torch.Generator().manual_seed(0))
    exact = advantage.double()
    moments = exact.sum().item(), exact.square().sum().item()
    exact = (exact - exact.mean()) / (exact.std(correction=0) + 1e-8)
    found = normalize_advantage(advantage, torch.full((48,), 1 / 48))
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)
    of_ranks = normalize_by_moments(advantage, 48, *moments)
    torch.testing.assert_close(of_ranks, exact.float(), rtol=1e-3, atol=1e-3)


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.zeros(3), returns) == 0
    assert explained_variance(torch.tensor([0.0, 1.0, 2.0]), torch.ones(3)) == 0
    value = torch.tensor([3.0, 0.0, 2.0])  # errors −2, 2, 1
    torch.testing.assert_close(explained_variance(value, returns), torch.tensor(1 - 13 / 3))


def test_rounding_errors_of_returns_do_not_count_as_variance():
    value = torch.linspace(-0.7, 0.7, 100)
    returns = (1 - value) + value  # advantages and values
    assert returns.var() > 0
    assert explained_variance(value, returns) == 0
    assert explained_variance(value, 1 + 1e-4 * value) < -1e3, "it was no rounding"


def test_explained_variance_of_equal_returns_is_0():
    agent, no = build(4, minibatches=1), np.zeros(4, bool)
    obs = np.random.default_rng(0).normal(size=(17, 4, 4)).astype(np.float32)
    for t in range(16):  # one-step episodes of return 1
        valid = np.full(4, t % 2 == 0)
        decision = act(agent, obs[t])
        agent.observe(decision, Step(obs[t + 1], valid.astype(np.float32), valid, no, valid, ()))
    metrics = agent.update()
    found = dict(zip(metrics.names, metrics.values.tolist(), strict=True))
    assert found["train/explained_variance"] == 0
