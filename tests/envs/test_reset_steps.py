"""Reset steps are invalid: never counted or rewarded, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
from own_kernels import COUNTED
from toy_environments import COUNTER, NO_ACTION, settings

from steadyrl.envs.factory import build_env


def play(env, timesteps, seed=0):
    """Yield (observation, action, step) for some timesteps."""
    rng = np.random.default_rng(seed)
    obs = env.reset()
    for _ in range(timesteps):
        action = rng.integers(0, 3, env.spec.num_envs)
        before = obs.copy()
        step = env.step(action)
        yield before, action, step
        obs = step.obs


CASES = [
    (backend, num_envs, kwargs)
    for backend in ("sync", "async", "batch", "kernel")
    for num_envs in (1, 3)
    for kwargs in (
        ({}, {"length": 1}, {"ends": "truncated"}, {"ends": "both", "length": 2})
        if backend in ("sync", "async")
        else ({}, {"length": 1})
    )
]


@pytest.mark.parametrize(("backend", "num_envs", "kwargs"), CASES)
def test_steps_and_episodes_equal_the_counters(backend, num_envs, kwargs):
    env_id = COUNTED if backend == "kernel" else COUNTER
    config = settings(env_id, backend=backend, num_envs=num_envs, kwargs=kwargs)
    with build_env(config, seed=0) as env:
        done = np.zeros(num_envs, bool)
        counted = [[] for _ in range(num_envs)]
        finished = []
        for obs, action, step in play(env, 60):
            assert (step.valid == ~done).all()
            for i in range(num_envs):
                steps, last_action, _ = step.obs[i]
                if done[i]:
                    assert (steps, last_action) == (0, NO_ACTION)
                    assert step.reward[i] == 0
                    assert not (step.terminated[i] or step.truncated[i])
                    counted[i] = []
                else:
                    assert (steps, last_action) == (obs[i][0] + 1, action[i])
                    assert step.reward[i] == steps
                    counted[i].append(step.reward[i])
                if step.terminated[i] or step.truncated[i]:
                    finished.append((i, sum(counted[i]), len(counted[i])))
            done = step.terminated | step.truncated
            assert [e[:3] for e in step.episodes] == finished
            finished = []
            if kwargs.get("ends") == "both":
                assert (step.terminated == step.truncated).all()


def test_arrays_stay_valid_until_the_second_next_step():
    with build_env(settings(num_envs=2), seed=0) as env:
        env.reset()
        previous = None
        for _ in range(20):
            step = env.step(np.zeros(2, np.int64))
            if previous is not None:
                for array, copy in previous:
                    np.testing.assert_array_equal(array, copy)
            previous = [(array, array.copy()) for array in step[:5]]


def test_seeds_determine_steps_and_environments_differ():
    def timesteps(seed):
        with build_env(settings(num_envs=3), seed=seed) as env:
            return np.array([step.obs.copy() for _, _, step in play(env, 30)])

    np.testing.assert_array_equal(timesteps(0), timesteps(0))
    assert not np.array_equal(timesteps(0), timesteps(1))
    assert len(np.unique(timesteps(0)[0, :, 2])) == 3


def test_every_episode_has_another_seed():
    with build_env(settings(kwargs={"length": 2}), seed=0) as env:
        seeds = {step.obs[0, 2] for _, _, step in play(env, 30) if not step.valid[0]}
    assert len(seeds) == 10


def test_send_and_receive_must_alternate():
    with build_env(settings(), seed=0) as env:
        with pytest.raises(RuntimeError, match="reset"):
            env.send(np.zeros(1, np.int64))
        env.reset()
        with pytest.raises(RuntimeError, match="send"):
            env.receive()
        env.send(np.zeros(1, np.int64))
        with pytest.raises(RuntimeError, match="receive"):
            env.send(np.zeros(1, np.int64))


def test_spec_describes_the_observations():
    with build_env(settings(num_envs=2), seed=0) as env:
        assert env.spec.id == COUNTER
        assert env.reset().shape == (2, *env.spec.observation_shape)
        assert env.observation.dtype == env.spec.dtype
