"""DQN on several ranks equals one process that learns from all of their transitions."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from changed import changed
from forked_ranks import together

from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.dqn.build import build_loss_spec, init_network
from steadyrl.agents.learner.learner import Learner
from steadyrl.buffers.replay.buffer import ReplayBatch
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import DiscreteActions, EnvSpec
from steadyrl.training.checkpoints.summary import weights_hash
from tests.agents.dqn.test_agent import CPU, SETTINGS, Chain

ENVS, UPDATES = 2, 6
SPEC = EnvSpec("Chain", ENVS, (8,), "float32", 1, DiscreteActions(2))
WHOLE = replace(
    SETTINGS,
    replay=replace(SETTINGS.replay, prioritized=True, capacity=240),
    batch_size=13,  # which no number of ranks divides
    learning_starts=60,
    target_every=10**9,
    max_grad_norm=0.5,
    n_step=2,
)


def agent_of(comm, **changes):
    settings = changed(WHOLE, **changes).of_rank(comm.rank, comm.size)
    agent = DQN(settings, SPEC, device=CPU, seed=comm.rank, total_steps=1000)
    agent.attach_comm(comm)
    return agent


def train(comm, agent, updates):
    """Act and learn on a rank, with its own episode lengths."""
    env = Chain(ENVS, [3 + comm.rank, 7], True, seed=comm.rank)
    obs = env.reset()
    while agent.updates < updates:
        decision = agent.actor(ENVS, explore=True).act(obs, np.zeros(ENVS, bool))
        step = env.step()
        comm.sync_counts(int(step.valid.sum()), (), now=agent.syncs_this_step)
        agent.observe(decision, step)
        agent.update()
        obs = step.obs


def recorded(comm, **changes):
    """Return a rank's batches and priorities, and the resulting weights."""
    agent = agent_of(comm, **changes)
    found, step = [], agent._learner.step

    def record(batch, rate, *numbers):
        leaves = agent._replay._priorities.leaves.copy()
        begin = agent._learner.network.weights.detach().clone()
        reports = step(batch, rate, *numbers)
        after = agent._learner.network.weights.detach().numpy().copy()
        arrays = [part.numpy().copy() for part in batch]
        noise = [
            number.numpy().copy() for number in numbers
        ]  # tensors are shared with the rank's process
        steps = agent._clock.steps
        beta = agent._beta.at(steps)
        found.append((arrays, leaves, beta, rate, begin.numpy(), after, steps, noise))
        return reports

    agent._learner.step = record
    train(comm, agent, UPDATES)
    return found, agent._replay.max_priority


@pytest.mark.parametrize(
    ("size", "noisy", "by"),
    [(2, False, "replay"), (3, False, "replay"), (2, True, "replay"), (3, False, "batch")],
)
def test_dqn_on_ranks_equals_one_process(size, noisy, by):
    options = {"noisy__enabled": noisy, "replay__normalize_weights": by}
    ranks = together(size, partial(recorded, **options))
    settings = changed(WHOLE, **options)
    online, target = (init_network(settings, SPEC, CPU, seed=0) for _ in range(2))
    one = Learner(build_loss_spec(settings), online, "direct", frozen=(target,))
    first = torch.from_numpy(ranks[0][0][0][4])
    online.weights.copy_(first)
    target.weights.copy_(first)
    for each in zip(*(found for found, _ in ranks), strict=True):
        # Drawn with P(i) = p_i / Σp / ranks, so weighted with (P / smallest P)^-β, the smallest of
        # all replays or of the whole batch.
        of_ranks = [leaves / leaves.sum() for _, leaves, *_ in each]
        of_batches = [
            priority_fraction[arrays[-1]]
            for (arrays, *_), priority_fraction in zip(each, of_ranks, strict=True)
        ]
        smallest = min(
            priority_fraction[priority_fraction > 0].min()
            for priority_fraction in (of_batches if by == "batch" else of_ranks)
        )
        beta, rate, before, _, steps, noise = each[0][2:]
        assert len(noise) == noisy
        weights = []
        for (arrays, *_), priority_fraction in zip(each, of_ranks, strict=True):
            weight = (priority_fraction[arrays[-1]] / smallest) ** -beta
            np.testing.assert_allclose(arrays[-2], weight, rtol=1e-6)
            weights.append(weight)
        fields = [
            torch.from_numpy(np.concatenate([arrays[i] for arrays, *_ in each])) for i in range(7)
        ]
        assert len(fields[0]) == WHOLE.batch_size
        np.testing.assert_allclose(one.network.weights.detach().numpy(), before, atol=1e-6)
        batch = ReplayBatch(*fields)._replace(
            weight=torch.from_numpy(np.concatenate(weights)).float()
        )
        one.step(batch, rate, *map(torch.from_numpy, noise))
        for rank in each:
            np.testing.assert_allclose(one.network.weights.detach().numpy(), rank[5], atol=1e-6)
            np.testing.assert_array_equal(rank[5], each[0][5])
            assert rank[6] == steps
            assert all(map(np.array_equal, rank[7], noise))
    # New transitions start with the largest error that any rank has seen.
    assert len({peak for _, peak in ranks}) == 1


def hashed(comm):
    agent = agent_of(comm, target_every=40)
    train(comm, agent, 100)
    return weights_hash(agent.weights()), agent.target_updates


def test_ranks_have_equal_weights_after_100_updates():
    one, other = together(2, hashed)
    assert one == other
    assert one[1] > 3


def emptied(comm):
    """Let a rank learn from a replay of one timestep, which is empty after each episode."""
    tiny = replace(WHOLE.replay, capacity=2 * ENVS, prioritized=False)
    agent = agent_of(comm, replay=tiny, batch_size=2, learning_starts=0, train_every=1)
    env, found = Chain(ENVS, [7, 7], True, seed=comm.rank), []
    obs = env.reset()
    for _ in range(40):
        decision = agent.actor(ENVS, explore=True).act(obs, np.zeros(ENVS, bool))
        step = env.step()
        comm.sync_counts(int(step.valid.sum()), (), now=agent.syncs_this_step)
        agent.observe(decision, step)
        agent.update()
        found.append((len(agent._replay), agent.updates))
        obs = step.obs
    return found, weights_hash(agent.weights())


def test_ranks_skip_updates_until_every_replay_has_samples():
    (one, its_weights), (other, other_weights) = together(2, emptied)
    assert [updates for _, updates in one] == [updates for _, updates in other]
    assert its_weights == other_weights
    lengths = [length for length, _ in one]
    assert 0 in lengths[lengths.index(ENVS) :], "it never emptied"
    assert one[-1][1] > 10


def test_a_batch_smaller_than_the_number_of_ranks_is_rejected():
    with pytest.raises(SettingError, match="batch_size=13: leaves nothing for some of 14 ranks"):
        WHOLE.of_rank(0, 14)
    of_ranks = [WHOLE.of_rank(rank, 3) for rank in range(3)]
    assert [priority_fraction.batch_size for priority_fraction in of_ranks] == [5, 4, 4]
    assert {priority_fraction.replay.capacity for priority_fraction in of_ranks} == {80}
