"""Restored environments continue exactly, or cut their episodes with a warning."""

from __future__ import annotations

import numpy as np
import pytest
from toy_environments import Counter, settings

from steadyrl.core.command.typed import command_of
from steadyrl.envs.factory import build_env

IDS = ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4", "CliffWalking-v1"]

KERNELS = [*IDS, "MountainCar-v0", "MountainCarContinuous-v0"]
EXTRAS = [
    ("LunarLander-v3", "Box2D"),
    ("Hopper-v5", "mujoco"),
    *((f"MinAtar/{game}-v1", "minatar") for game in ("Asterix", "Breakout", "Freeway", "Seaquest")),
    ("MinAtar/SpaceInvaders-v1", "minatar"),
]


def actions(env_id, num_envs, timesteps):
    rng = np.random.default_rng(3)
    continuous = {"Pendulum-v1": 1, "MountainCarContinuous-v0": 1, "Hopper-v5": 3}
    if env_id in continuous:
        return rng.uniform(-2, 2, (timesteps, num_envs, continuous[env_id])).astype(np.float32)
    return rng.integers(0, 2, (timesteps, num_envs))


def record(env, sequence):
    return [[array.copy() for array in env.step(action)[:5]] for action in sequence]


@pytest.mark.parametrize(
    ("env_id", "backend", "num_envs", "stack"),
    [
        *((i, "sync", 3, 1) for i in IDS),
        ("CartPole-v1", "sync", 2, 3),
        ("CartPole-v1", "batch", 8, 1),
        *((i, "kernel", 3, 1) for i in KERNELS),
        ("CartPole-v1", "kernel", 2, 3),
    ],
)
@pytest.mark.parametrize("before", [0, 57])
def test_a_restored_environment_continues_exactly(env_id, backend, num_envs, stack, before):
    config = settings(env_id, backend=backend, num_envs=num_envs, frame_stack=stack)
    sequence = actions(env_id, num_envs, 300)
    with build_env(config, seed=7) as one, build_env(config, seed=7) as other:
        one.reset()
        record(one, sequence[:before])
        state = one.state_dict()
        seen = one.observation.copy()
        expected = record(one, sequence[before:])
        other.load_state_dict(state)
        np.testing.assert_array_equal(other.observation, seen)
        for ours, theirs in zip(record(other, sequence[before:]), expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("env_id", "module"), EXTRAS)
def test_restored_environments_of_extras_continue_exactly(env_id, module):
    pytest.importorskip(module)
    test_a_restored_environment_continues_exactly(env_id, "sync", 2, 1, 171)
    if env_id.startswith("MinAtar/"):
        test_a_restored_environment_continues_exactly(env_id, "kernel", 2, 1, 171)


@pytest.mark.parametrize("backend", ["sync", "async", "batch", "kernel"])
def test_a_state_saved_before_reset_repeats_the_reset(backend):
    config = settings("CartPole-v1", backend=backend, num_envs=8)
    sequence = actions("CartPole-v1", 8, 60)
    with build_env(config, seed=1) as env:
        start = env.state_dict()
        first = env.reset().copy()
        expected = record(env, sequence)
        env.load_state_dict(start)
        np.testing.assert_array_equal(env.reset(), first)
        for ours, theirs in zip(record(env, sequence), expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)


def test_episode_statistics_are_restored():
    config = settings(kwargs={"length": 6})
    zeros = np.zeros(1, np.int64)
    with build_env(config, seed=0) as one, build_env(config, seed=0) as other:
        one.reset()
        for _ in range(4):
            one.step(zeros)
        other.load_state_dict(one.state_dict())
        other.step(zeros)
        assert [e[:3] for e in other.step(zeros).episodes] == [(0, 21.0, 6)]


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_episode_that_cannot_be_replayed_is_cut(backend, caplog):
    config = settings("CartPole-v1", num_envs=2, backend=backend)
    zeros = np.zeros(2, np.int64)
    with build_env(config, seed=0) as one, build_env(config, seed=0) as other:
        one.reset()
        for _ in range(5):
            one.step(zeros)
        state = one.state_dict()
        state["actions"]["1"] = 1 - state["actions"]["1"]  # another trajectory
        other.load_state_dict(state)
        np.testing.assert_array_equal(other.observation, one.observation)
        assert "environment 1" in caplog.text
        step, expected = other.step(zeros), one.step(zeros)
        assert step.valid.tolist() == [True, False]
        assert not (step.terminated | step.truncated).any()
        np.testing.assert_array_equal(step.obs[0], expected.obs[0])
        assert (np.abs(step.obs[1]) <= 0.05).all()  # a first observation of CartPole
        while not (step := other.step(zeros)).episodes:
            assert step.valid.all()
        assert {e.env: e.length for e in step.episodes}.get(1, 8) <= 10


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_episodes_that_end_earlier_than_before_spend_no_restarts(backend, caplog):
    zeros = np.zeros(2, np.int64)
    known = {"num_envs": 2, "backend": backend, "max_restarts": 0}
    config = settings(kwargs={"length": 9}, **known)
    shorter = settings(kwargs={"length": 3}, **known)
    with build_env(config, seed=0) as one, build_env(shorter, seed=0) as other:
        one.reset()
        for _ in range(5):
            one.step(zeros)
        other.load_state_dict(one.state_dict())
        assert "environment 1 could not be replayed" in caplog.text
        assert not other.step(zeros).valid.any()  # both begin a new episode
        assert other.step(zeros).valid.all()


CHANGED_ACTIONS = {
    "missing": (lambda actions: actions.pop("1"), "none of the 5"),
    "shorter": (lambda actions: actions.update({"1": actions["1"][:-1]}), "4 of the 5"),
    "longer": (lambda actions: actions.update({"1": actions["1"].repeat(2)}), "10 of the 5"),
    "empty": (lambda actions: actions.update({"1": actions["1"][:0]}), "0 of the 5"),
}


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("name", CHANGED_ACTIONS)
def test_actions_of_a_part_of_the_episode_are_rejected(backend, name):
    config = settings("CartPole-v1", num_envs=2, backend=backend)
    change, found = CHANGED_ACTIONS[name]
    with build_env(config, seed=0) as env:
        env.reset()
        for action in (0, 1, 0, 1, 0):
            env.step(np.full(2, action))
        state = env.state_dict()
        env.load_state_dict(state)
        change(state["actions"])
        with pytest.raises(ValueError, match=f"env.actions.1: {found} of its episode"):
            env.load_state_dict(state)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_pending_cut_is_saved(backend):
    config = settings("CartPole-v1", backend=backend)
    zeros = np.zeros(1, np.int64)
    with build_env(config, seed=0) as env:
        env.reset()
        env.step(zeros)
        state = env.state_dict()
        state["actions"]["0"] = 1 - state["actions"]["0"]  # another trajectory
        env.load_state_dict(state)
        env.load_state_dict(env.state_dict())
        assert env.step(zeros).valid.tolist() == [False]
        assert env.step(zeros).valid.tolist() == [True]


def test_a_state_of_another_num_envs_is_rejected():
    with (
        build_env(settings(num_envs=2), seed=0) as two,
        build_env(settings(num_envs=3), seed=0) as three,
        pytest.raises(ValueError, match="2 environments, here are 3"),
    ):
        three.load_state_dict(two.state_dict())


def test_saving_between_send_and_receive_raises():
    with build_env(settings(), seed=0) as env:
        env.reset()
        env.send(np.zeros(1, np.int64))
        with pytest.raises(RuntimeError, match="between"):
            env.state_dict()


BACKENDS = ["sync", "async", "batch", "kernel", "envpool"]
REPLAYED = {"sync", "async"}


@pytest.mark.parametrize("before", BACKENDS)
@pytest.mark.parametrize("after", BACKENDS)
def test_a_state_of_another_backend_continues_or_cuts_episodes(before, after, caplog):
    """So a run survives another choice of `auto` on another machine."""
    if "envpool" in (before, after):
        pytest.importorskip("envpool")
    sequence = actions("CartPole-v1", 3, 40)
    one, other = (
        settings("CartPole-v1", backend=backend, num_envs=3) for backend in (before, after)
    )
    with build_env(one, seed=7) as saved, build_env(other, seed=7) as env:
        saved.reset()
        record(saved, sequence[:25])
        state, seen = saved.state_dict(), saved.observation.copy()
        env.load_state_dict(state)
        np.testing.assert_array_equal(env.observation, seen)
        timesteps, expected = record(env, sequence[25:]), record(saved, sequence[25:])
    if before == after != "envpool" or {before, after} == REPLAYED:
        for ours, theirs in zip(timesteps, expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)
    else:
        assert not timesteps[0][4].any() and timesteps[1][4].all()
        assert "CartPole" in caplog.text or "environment" in caplog.text


def test_an_environment_that_ignores_its_seed_is_told_of_when_it_is_continued(monkeypatch, caplog):
    draws = iter(range(1, 100))

    def unseeded(env):
        return np.array([env._steps, env._action, next(draws)], np.float32)

    monkeypatch.setattr(Counter, "_observation", unseeded)
    config = settings(num_envs=2, kwargs={"length": 9})
    with build_env(config, seed=0) as env, build_env(config, seed=0) as other:
        env.reset()
        env.step(np.zeros(2, np.int64))
        other.load_state_dict(env.state_dict())
    [line] = [each.getMessage() for each in caplog.records if "cannot be continued" in each.message]
    said = f"came out differently ({command_of('envs')} check toy_environments:Counter-v0)"
    assert line.endswith(said)
