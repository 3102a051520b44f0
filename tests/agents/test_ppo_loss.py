"""The loss and its gradient against a twin written in plain NumPy float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ppo_agents import CPU, SETTINGS

from agents.actor_critic import ActorCritic
from agents.compiling import flatten, traced
from agents.heads import BoxHead, DiscreteHead
from agents.networks import FlatNetwork
from agents.ppo_loss import explained_variance, normalised, policy_loss
from agents.ppo_update import METRICS, PPOUpdate
from buffers.batch import RolloutBatch


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


def setting(box=False, rows=24, seed=0, **changes):
    """A network away from its start, and a batch whose old policy was another one."""
    generator = torch.Generator().manual_seed(seed)
    head = BoxHead(2) if box else DiscreteHead(3)
    s = replace(SETTINGS, hidden=(5,), max_grad_norm=0.0, **changes)
    net = ActorCritic(
        (4,), "float32", head, hidden=s.hidden, activation="tanh", shared=False, normalise=False,
        log_std=-0.3,
    )  # fmt: skip
    net.start_(generator)
    flat = FlatNetwork(net, CPU)
    flat.weights.add_(torch.randn(flat.weights.shape, generator=generator) * 0.3)
    obs = torch.randn(rows, 4, generator=generator)
    with torch.no_grad():
        parameters, value = net(obs)
        noise = head.draw_(torch.empty(rows, *head.noise_shape), generator)
        action = head.sample(parameters, noise)
        log_prob = head.log_prob(parameters, action)
    normal = [torch.randn(rows, generator=generator) for _ in range(4)]
    batch = RolloutBatch(
        obs, action, log_prob + 0.3 * normal[0], value + 0.3 * normal[1], normal[2], normal[3]
    )
    return s, flat, head, batch


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("clip_value", [False, True])
def test_loss_parts_and_gradient_are_those_of_the_twin(box, clip_value):
    s, flat, head, batch = setting(box, clip_value=clip_value, entropy_coef=0.1)
    update = PPOUpdate(s, flat, head, "eager", len(batch.obs))
    w = {n: v.double().numpy().copy() for n, v in flat.views(flat.weights).items()}
    expected = numpy_loss(w, batch, s, 0.2, box)
    assert 0.1 < expected[-1] < 0.9, "some rows must be clipped and some not"
    gradient = numpy_gradient(w, batch, s, 0.2, box)
    update.set_rates(0.0, 0.2)
    metrics = update(batch)
    np.testing.assert_allclose(metrics[:6].numpy(), expected, rtol=1e-5, atol=1e-6)
    for name, truth in gradient.items():
        ours = flat.views(flat.gradient)[name].numpy()
        np.testing.assert_allclose(ours, truth, rtol=1e-4, atol=1e-6, err_msg=name)
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    assert metrics[METRICS.index("train/grad_norm")].item() == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("rows", [24, 23, 7])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_pieces_add_up_to_the_gradient_of_the_whole(rows, count):
    gradients = []
    for k in (1, count):
        s, flat, head, batch = setting(rows=rows, grad_accumulation=k)
        update = PPOUpdate(s, flat, head, "eager", rows)
        update.set_rates(0.0, 0.2)
        metrics = update(batch)
        gradients.append((flat.gradient.clone(), metrics))
    for whole, pieces in zip(*gradients, strict=True):
        torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", [24, 17])
@pytest.mark.parametrize("count", [1, 3])
def test_the_traced_function_takes_the_same_step(rows, count):
    """What the compiler is given is run as it is; padding to 24 rows changes nothing."""

    def run_traced(*args):
        graph, captured = traced(update._graph, args)
        return graph(*flatten(args), *captured)

    results = []
    for mode in ("eager", "graph"):
        s, flat, head, batch = setting(rows=rows, grad_accumulation=count, target_kl=1.0)
        update = PPOUpdate(s, flat, head, "eager" if mode == "eager" else "compiled", 24)
        if mode == "graph":
            update._step = run_traced
        update.set_rates(1e-2, 0.2)
        for _ in range(3):
            metrics = update(batch)
        results.append((flat.weights, metrics, *update.state_dict().values()))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_the_compiled_graph_takes_the_same_step(caplog):
    results = []
    for mode in ("eager", "compiled"):
        s, flat, head, batch = setting()
        update = PPOUpdate(s, flat, head, mode, 24)
        for k in range(5):
            update.set_rates(1e-2 / (k + 1), 0.2)
            metrics = update(batch)
        results.append((flat.weights, metrics))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, atol=1e-5, rtol=1e-4)
    assert "running eagerly" not in caplog.text


def test_a_step_beyond_the_target_kl_is_not_taken():
    s, flat, head, batch = setting(target_kl=1e-6)
    update = PPOUpdate(s, flat, head, "eager", 24)
    update.set_rates(1e-2, 0.2)
    before = flat.weights.clone()
    metrics = update(batch)
    assert update.exceeded(metrics)
    assert torch.equal(flat.weights, before)
    assert update.state_dict()["step"] == 0


def test_a_step_within_the_target_kl_is_taken():
    s, flat, head, batch = setting(target_kl=10.0)
    update = PPOUpdate(s, flat, head, "eager", 24)
    update.set_rates(1e-2, 0.2)
    before = flat.weights.clone()
    assert not update.exceeded(update(batch))
    assert not torch.equal(flat.weights, before)


def test_the_gradient_is_clipped_as_a_whole():
    s, flat, head, batch = setting()
    update = PPOUpdate(replace(s, max_grad_norm=0.05), flat, head, "eager", 24)
    update.set_rates(0.0, 0.2)
    norm = update(batch)[METRICS.index("train/grad_norm")]
    assert norm > 0.05
    assert flat.gradient.norm().item() == pytest.approx(0.05, rel=1e-4)


def test_the_surrogate_is_the_papers():
    generator = torch.Generator().manual_seed(0)
    ratio = (torch.randn(1000, generator=generator) * 0.5).exp()
    advantage = torch.randn(1000, generator=generator)
    paper = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(policy_loss(ratio, advantage, 0.2), paper)


def test_advantages_are_normalised_over_the_rows_that_count():
    advantage = torch.tensor([1.0, 2.0, 3.0, 99.0])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0]) / 3
    expected = torch.tensor([-1.0, 0.0, 1.0]) * 1.5**0.5
    torch.testing.assert_close(normalised(advantage, weight)[:3], expected)
    assert normalised(torch.tensor([5.0]), torch.ones(1)) == 0


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.zeros(3), returns) == 0
    assert explained_variance(torch.tensor([0.0, 1.0, 2.0]), torch.ones(3)) == 0
