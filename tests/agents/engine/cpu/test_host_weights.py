"""Acting on the host while a device learns: the same actions, one weight copy per update burst."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from forked_ranks import together
from ppo_agents import CPU, SPACES, Episodes, collect
from ppo_agents import build as build_ppo

from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.engine.cpu import host_weights as mirror
from steadyrl.agents.engine.cpu.host_weights import HostWeights, is_faster_on_host, seconds
from steadyrl.envs.types import DiscreteActions, EnvSpec
from tests.agents.dqn.test_agent import SETTINGS


@pytest.fixture
def copies(monkeypatch):
    """Treat the host as a device that is slower to act on; return the list of weight copies."""
    made = []
    sync_weights = HostWeights.sync_weights

    def counted(self):
        before = self._seen
        sync_weights(self)
        made.append(before != self._seen)

    monkeypatch.setattr(HostWeights, "sync_weights", counted)

    def as_a_device():
        monkeypatch.setattr(mirror, "host_sees", lambda _: False)
        monkeypatch.setattr(mirror, "is_faster_on_host", lambda *_, **__: True)
        return made

    return as_a_device


def learned_by_dqn():
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, DiscreteActions(3))
    settings = replace(SETTINGS, learning_starts=8, train_every=12, epsilon_end=0.3)
    agent, env = DQN(settings, spec, device=CPU, seed=0, total_steps=400), Episodes()
    obs, actions = env.reset(), []
    for _ in range(60):
        decision = agent.actor(3, explore=True).act(obs, np.zeros(3, bool))
        actions.append(decision.env_action.tolist())
        step = env.step()
        agent.observe(decision, step)
        agent.update()
        obs = step.obs
    actions.append(agent.actor(3, explore=False).act(obs, np.zeros(3, bool)).env_action.tolist())
    return actions, agent._learner.network.weights, agent.updates


def test_dqn_acts_the_same_with_host_weights(copies):
    plain = learned_by_dqn()
    made = copies()
    ours = learned_by_dqn()
    assert ours[0] == plain[0]
    assert torch.equal(ours[1], plain[1])
    bursts = sum(made)
    assert 10 < bursts <= ours[2] + 1 < len(made)


@pytest.mark.parametrize("action", ["discrete", "box", "multidiscrete"])
@pytest.mark.parametrize("normalise", [False, True])
def test_ppo_acts_the_same_with_host_weights(copies, action, normalise):
    def learned():
        agent = build_ppo(action=SPACES[action], normalize_obs=normalise, popart=normalise)
        env = Episodes()
        obs = env.reset()
        for _ in range(3):
            obs = collect(agent, env, obs, 16)
            agent.update()
        best = agent.actor(3, explore=False).act(obs, np.zeros(3, bool)).env_action
        return best, agent._learner.network.weights

    plain = learned()
    made = copies()
    ours = learned()
    for one, other in zip(plain, ours, strict=True):
        assert torch.equal(one, other)
    # While statistics change at every timestep, they are copied at every timestep.
    assert sum(made) == (4 + 16 if normalise else 4)


def test_loaded_weights_are_copied_to_the_host(copies):
    made = copies()
    agent, other = build_ppo(), build_ppo(seed=1)
    obs = Episodes().reset()
    before = agent.actor(3, explore=False).act(obs, np.zeros(3, bool)).env_action
    agent.load_weights(other.weights())
    count = sum(made)
    after = agent.actor(3, explore=False).act(obs, np.zeros(3, bool)).env_action
    theirs = other.actor(3, explore=False).act(obs, np.zeros(3, bool)).env_action
    assert sum(made) == count + 1
    assert torch.equal(after, theirs)
    assert before.shape == after.shape


def decided_by_rank(comm, build):
    """Return a rank's actions before and after attaching the communicator."""
    mirror.host_sees, mirror.is_faster_on_host = lambda _: False, lambda *_, **__: True
    agent = build(comm.rank)
    obs, episode_starts = (
        np.random.default_rng(0).normal(size=(500, 4)).astype("f"),
        np.zeros(500, bool),
    )
    decide = lambda: agent.actor(500, explore=False).act(obs, episode_starts).env_action.tolist()  # noqa: E731
    before = decide()
    agent.attach_comm(comm)
    return before, decide()


def a_dqn(seed):
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, DiscreteActions(3))
    return DQN(SETTINGS, spec, device=CPU, seed=seed, total_steps=400)


@pytest.mark.parametrize(
    "build", [a_dqn, lambda seed: build_ppo(action=SPACES["discrete"], seed=seed)]
)
def test_ranks_act_with_rank_0s_weights_from_the_start(build):
    (first, before), (other, after) = together(2, decided_by_rank, build)
    assert first == before == after != other


class Clock:
    """A clock that only the calls under test advance."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, duration):
        def call():
            self.now += duration

        return call


@pytest.mark.parametrize(
    ("here", "copy", "rows", "there", "host"),
    [
        (1.0, 4.0, 8, 2.0, True),
        (1.0, 4.0, 2, 2.0, False),  # 3 with a copy every other timestep
        (3.0, 0.0, 8, 2.0, False),
        (1.0, 0.5, 0.1, 2.0, True),  # several updates per timestep need one copy
    ],
)
def test_the_faster_side_is_measured_including_weight_copies(here, copy, rows, there, host):
    clock = Clock()

    class Copied:
        def __init__(self):
            self.copy = clock.takes(copy)

    found = is_faster_on_host(
        Copied(), clock.takes(here), clock.takes(there), copy_interval=rows, clock=clock
    )
    assert found is host


def test_deterministic_runs_do_not_depend_on_timings(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert is_faster_on_host(None, clock.takes(9.0), clock.takes(1.0), copy_interval=1, clock=clock)
    assert clock.now == 0


def test_durations_are_medians():
    clock, calls = Clock(), []

    def call():
        calls.append(1)
        clock.now += 100.0 if len(calls) % 7 == 0 else 1.0

    assert seconds(call, clock) == 1.0
