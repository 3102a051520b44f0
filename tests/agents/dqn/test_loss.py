"""DQN's loss against a loop over single transitions."""

import numpy as np
import pytest
import torch

from steadyrl.agents.dqn.loss import td_loss
from steadyrl.agents.dqn.q_heads import ScalarHead
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.buffers.replay.buffer import ReplayBatch

ACTIONS = 3


def network(seed, dueling):
    torch.manual_seed(seed)
    return QNetwork((4,), "float32", ACTIONS, (16,), dueling).double()


def batch(size=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    return ReplayBatch(
        obs=torch.randn(size, 4, generator=g).double(),
        action=torch.randint(ACTIONS, (size,), generator=g),
        reward=torch.randn(size, generator=g).double() * 3,
        # n-step windows of several lengths, and some that end in a termination.
        discount=torch.tensor([0.9**3, 0.9, 0.0, 0.9**2] * (size // 4)).double(),
        next_obs=torch.randn(size, 4, generator=g).double(),
        weight=torch.rand(size, generator=g).double(),
        index=torch.arange(size),
    )


def loop(online, target, data, double, huber):
    """Compute the loss one transition at a time, in Python numbers."""
    losses, errors = [], []
    for i in range(len(data.obs)):
        q = online(data.obs[i : i + 1])[0].detach().numpy()
        next_target = target(data.next_obs[i : i + 1])[0].detach().numpy()
        next_online = online(data.next_obs[i : i + 1])[0].detach().numpy()
        best = int(np.argmax(next_online)) if double else int(np.argmax(next_target))
        expected = float(data.reward[i]) + float(data.discount[i]) * next_target[best]
        error = q[int(data.action[i])] - expected
        if not huber:
            loss = error**2
        elif abs(error) < 1:
            loss = 0.5 * error**2
        else:
            loss = abs(error) - 0.5
        losses.append(float(data.weight[i]) * loss)
        errors.append(error)
    return np.mean(losses), np.array(errors)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("huber", [False, True])
def test_loss_and_td_errors_equal_a_loop(double, dueling, huber):
    online, target, data = network(0, dueling), network(1, dueling), batch()
    got = td_loss(online, target, data, head=ScalarHead(huber=huber), double=double)
    loss, errors = loop(online, target, data, double, huber)
    assert got.loss.mean().item() == pytest.approx(loss, rel=1e-12)
    (td_error,) = got.aux
    assert td_error.shape == (12,)
    np.testing.assert_allclose(td_error.numpy(), errors, rtol=1e-12)
    np.testing.assert_allclose(got.metrics[0].numpy(), np.abs(errors), rtol=1e-12)
    q = online(data.obs).detach().gather(1, data.action.unsqueeze(1)).squeeze(1)
    assert torch.equal(got.metrics[1], q)


@pytest.mark.parametrize("huber", [False, True])
def test_the_greedy_value_is_the_maximum(huber):
    q = torch.tensor([[1.0, 3.0, 2.0], [2.0, 2.0, -1.0], [-5.0, -5.0, -7.0]])
    data = ReplayBatch(*(part[:3] for part in batch()))
    data = data._replace(reward=torch.zeros(3), discount=torch.ones(3))
    for double in (True, False):
        same = scalar_targets(lambda obs: q, lambda obs: q, data, huber=huber, double=double)
        assert same.tolist() == [3.0, 2.0, -5.0]
    # Actions selected by another network.
    other = scalar_targets(lambda obs: -q, lambda obs: q, data, huber=huber, double=True)
    assert other.tolist() == [1.0, -1.0, -7.0]


def huber(online, target, data):
    """The mean loss, with double Q-learning."""
    return td_loss(online, target, data, head=ScalarHead(huber=True), double=True).loss.mean()


def scalar_targets(online, target, data, *, double, huber=True):
    """The targets: Q(s, a) minus the TD errors."""
    rows = td_loss(online, target, data, head=ScalarHead(huber=huber), double=double)
    return rows.metrics[1] - rows.aux[0]


def test_double_and_single_targets_differ():
    online, target, data = network(0, False), network(1, False), batch()
    double, single = (scalar_targets(online, target, data, double=d) for d in (True, False))
    assert not torch.allclose(double, single)
    assert (double <= single + 1e-12).all()


def test_no_gradient_flows_through_the_target():
    online, target, data = network(0, False), network(1, False), batch()
    huber(online, target, data).backward()
    assert all(p.grad is None for p in target.parameters())
    only_obs = data._replace(next_obs=torch.zeros_like(data.next_obs), discount=data.discount * 0)
    again = network(0, False)
    expected = scalar_targets(online, target, data, double=True)
    huber(again, target, only_obs._replace(reward=expected)).backward()
    for got, expected in zip(online.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_dueling_advantages_are_centred():
    net = network(0, True)
    obs = batch().obs
    value = net.value(net.trunk(obs))
    torch.testing.assert_close(net(obs).mean(1, keepdim=True), value)
