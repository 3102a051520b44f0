"""Return distributions and Munchausen targets against loops over plain numbers."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.agents.dqn.loss import Munchausen, munchausen_td_loss, td_loss
from steadyrl.agents.dqn.q_heads import CategoricalHead, QuantileHead, ScalarHead, project
from steadyrl.agents.networks.q_network import QNetwork
from tests.agents.dqn.test_loss import batch

CPU = torch.device("cpu")
ATOMS, LOW, HIGH = 7, -2.0, 4.0
SOFT = Munchausen(alpha=0.9, temperature=0.3, log_policy_min=-1.0)


def network(seed, shape):
    torch.manual_seed(seed)
    return QNetwork((4,), "float32", 3, (16,), True, shape).double()


def head_of(kind):
    if kind == "scalar":
        return ScalarHead(huber=True)
    # float64, as the networks here.
    torch.set_default_dtype(torch.float64)
    try:
        head = QuantileHead(ATOMS, CPU)
        return head if kind == "quantile" else CategoricalHead(ATOMS, LOW, HIGH, CPU)
    finally:
        torch.set_default_dtype(torch.float32)


def projected(targets, probs):
    """The algorithm of the paper, one atom at a time (Bellemare et al. 2017, algorithm 1)."""
    mass, step = np.zeros(ATOMS), (HIGH - LOW) / (ATOMS - 1)
    for target, prob in zip(targets, probs, strict=True):
        position = (min(max(target, LOW), HIGH) - LOW) / step
        lower, upper = math.floor(position), math.ceil(position)
        if lower == upper:
            mass[lower] += prob
        else:
            mass[lower] += prob * (upper - position)
            mass[upper] += prob * (position - lower)
    return mass


@settings(deadline=None)
@given(st.lists(st.floats(-9, 9), min_size=1, max_size=9), st.integers(0, 2**32 - 1))
def test_projection_equals_a_loop_including_clipping(targets, seed):
    probs = np.random.default_rng(seed).dirichlet(np.ones(len(targets)))
    got = project(
        torch.tensor([targets], dtype=torch.float64), torch.tensor(probs[None]), LOW, HIGH, ATOMS
    )
    np.testing.assert_allclose(got[0].numpy(), projected(targets, probs), atol=1e-12)
    assert got.sum().item() == pytest.approx(1)


def test_the_target_of_a_termination_is_the_reward():
    head, data = head_of("c51"), batch()._replace(discount=torch.zeros(12).double())
    online, target = network(0, head.shape), network(1, head.shape)
    (error,) = td_loss(online, target, data, head=head, double=True).aux
    for i in range(12):
        mass = projected([data.reward[i].item()], [1.0])
        log_p = online(data.obs[i : i + 1])[0, data.action[i]].log_softmax(0).detach().numpy()
        terms = [m * (math.log(m) - lp) for m, lp in zip(mass, log_p, strict=True) if m > 0]
        assert error[i].item() == pytest.approx(sum(terms))


def atoms_and_probs(kind, outputs):
    """Atoms and probabilities [A, M] of the outputs of one state."""
    if kind == "c51":
        probs = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
        return np.tile(np.linspace(LOW, HIGH, ATOMS), (3, 1)), probs
    outputs = outputs.reshape(3, -1)
    return outputs, np.full(outputs.shape, 1 / outputs.shape[1])


def sample_loss(kind, chosen, targets, probs):
    """Return the loss of one sample, in Python numbers."""
    if kind == "c51":
        log_p = chosen - np.log(np.exp(chosen).sum())
        mass = projected(targets, probs)
        return sum(m * (math.log(m) - lp) for m, lp in zip(mass, log_p, strict=True) if m > 0)
    if kind == "scalar":
        error = abs(chosen - np.dot(targets, probs))
        return 0.5 * error**2 if error < 1 else error - 0.5
    total = 0.0
    for i, theta in enumerate(chosen):
        for target, prob in zip(targets, probs, strict=True):
            delta = target - theta
            huber = 0.5 * delta**2 if abs(delta) < 1 else abs(delta) - 0.5
            total += prob * abs((i + 0.5) / len(chosen) - (delta < 0)) * huber
    return total


def loss_of(soft):
    """Return the loss with this Munchausen target, or without."""
    return td_loss if soft is None else partial(munchausen_td_loss, munchausen=soft)


def log_policy(values, temperature):
    scaled = values / temperature
    return temperature * (scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum()))


@pytest.mark.parametrize("soft", [None, SOFT], ids=["greedy", "munchausen"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["scalar", "c51", "quantile"])
def test_distributional_losses_equal_loops(kind, double, soft):
    head, data = head_of(kind), batch()
    online, target = network(0, head.shape), network(1, head.shape)
    got = loss_of(soft)(online, target, data, head=head, double=double)
    for i in range(12):
        now, before, after, judge = (
            net(obs[i : i + 1])[0].detach().numpy()
            for net, obs in (
                (online, data.obs),
                (target, data.obs),
                (target, data.next_obs),
                (online if double else target, data.next_obs),
            )
        )
        values = (lambda pair: (pair[0] * pair[1]).sum(1))(atoms_and_probs(kind, judge))
        returns, probs = atoms_and_probs(kind, after)
        action, reward = int(data.action[i]), float(data.reward[i])
        if soft is None:
            best = int(values.argmax())
            targets, target_probs = returns[best], probs[best]
        else:
            own = (lambda pair: (pair[0] * pair[1]).sum(1))(atoms_and_probs(kind, before))
            certain = log_policy(own, soft.temperature)[action]
            reward += soft.alpha * min(0.0, max(soft.log_policy_min, certain))
            log_pi = log_policy(values, soft.temperature)
            targets = (returns - log_pi[:, None]).reshape(-1)
            target_probs = (np.exp(log_pi / soft.temperature)[:, None] * probs).reshape(-1)
        targets = reward + float(data.discount[i]) * targets
        loss = sample_loss(kind, now[action], targets, target_probs)
        assert got.loss[i].item() == pytest.approx(float(data.weight[i]) * loss, rel=1e-9)
        mean = (lambda pair: (pair[0] * pair[1]).sum(1))(atoms_and_probs(kind, now))[action]
        assert got.metrics[1][i].item() == pytest.approx(mean, rel=1e-9)


def test_quantiles_converge_to_midpoints():
    head = QuantileHead(4, CPU)
    theta = torch.zeros(1, 4, requires_grad=True)
    targets = torch.linspace(0, 100, 4001).unsqueeze(0)
    for _ in range(3000):
        (gradient,) = torch.autograd.grad(head.loss(theta, targets, None)[0].sum(), theta)
        theta = (theta - 20 * gradient).detach().requires_grad_()
    np.testing.assert_allclose(theta[0].detach().numpy(), [12.5, 37.5, 62.5, 87.5], atol=0.7)


def test_the_priority_of_a_distribution_is_its_kl():
    head = CategoricalHead(3, 0.0, 2.0, CPU)
    probs = torch.tensor([[0.2, 0.3, 0.5]])
    loss, priority = head.loss(probs.log(), torch.tensor([[0.0, 1.0, 2.0]]), probs)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert torch.equal(loss, priority)


def test_munchausen_at_zero_temperature_is_a_hard_maximum():
    data = batch()
    online, target = network(0, ()), network(1, ())
    cold = Munchausen(alpha=0.0, temperature=1e-6, log_policy_min=-1.0)
    hard, soft = (
        loss_of(m)(online, target, data, head=head_of("scalar"), double=True).loss
        for m in (None, cold)
    )
    torch.testing.assert_close(soft, hard, rtol=1e-4, atol=1e-5)
