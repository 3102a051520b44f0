"""Contract of every backend: steps, validity, episode statistics, action log, seeds, state."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from toy_environments import settings

from steadyrl.envs.factory import build_env

ENVS = 2
# backend → (environment, kwargs, required module, timesteps of several episodes, exact resume?)
BACKENDS = {
    "sync": ("toy_environments:Counter-v0", {}, "gymnasium", 40, True),
    "async": ("toy_environments:Counter-v0", {}, "gymnasium", 40, True),
    "batch": ("toy_environments:Counter-v0", {"length": 3}, "gymnasium", 40, True),
    "batch, CartPole": ("CartPole-v1", {}, "gymnasium", 120, True),
    "kernel": ("own_kernels:Counted-v0", {}, "gymnasium", 40, True),
    "kernel, CartPole": ("CartPole-v1", {}, "gymnasium", 120, True),
    "ale": ("ALE/Pong-v5", {"max_num_frames_per_episode": 100}, "ale_py", 60, False),
    "ale, lives": (
        "ALE/Breakout-v5",
        {"max_num_frames_per_episode": 400, "episodic_life": True},
        "ale_py",
        120,
        False,
    ),
    "envpool": ("CartPole-v1", {}, "envpool", 80, False),
    "envpool, Atari": (
        "Pong-v5",
        {"max_episode_steps": 20, "num_threads": 1},
        "envpool",
        50,
        False,
    ),
}
REPLAYED = ("sync", "async")  # which restore episodes from seed and actions


@pytest.fixture(params=BACKENDS)
def backend(request):
    if find_spec(BACKENDS[request.param][2]) is None:
        pytest.skip(f"needs {BACKENDS[request.param][2]}")
    return request.param


def build(backend, seed=0, num_envs=ENVS, **changes):
    env_id, kwargs, *_ = BACKENDS[backend]
    config = settings(
        env_id, backend=backend.partition(",")[0], kwargs=kwargs, num_envs=num_envs, **changes
    )
    return build_env(config, seed=seed)


def timesteps_of(backend):
    return BACKENDS[backend][3]


def actions(env, timesteps, seed=0):
    return np.random.default_rng(seed).integers(
        0, env.spec.action.n, (timesteps, env.spec.num_envs)
    )


def copy(step):
    return [array.copy() for array in step[:5]] + [step.episodes]


def same(one, other):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def play(env, sequence):
    return [copy(env.step(action)) for action in sequence]


@pytest.mark.parametrize("stack", [1, 3])
def test_steps_fulfil_the_contract(backend, stack):
    with build(backend, frame_stack=stack) as env:
        obs, spec = env.reset(), env.spec
        assert env.episode_starts.tolist() == [True] * ENVS
        done, previous, resets = np.zeros(ENVS, bool), None, 0
        for action in actions(env, timesteps_of(backend)):
            step = env.step(action)
            if previous is not None:  # arrays stay valid until the second next step
                same([previous[0]], [previous[1]])
            previous = (step[:5], copy(step)[:5])
            assert env.observation is step.obs
            assert step.obs.shape == obs.shape == (ENVS, *spec.observation_shape)
            assert (step.obs.dtype, step.reward.dtype) == (np.dtype(spec.dtype), np.float32)
            assert {flags.dtype for flags in step[2:5]} == {np.dtype(bool)}
            if "lives" not in backend:  # after a lost life steps are invalid, too
                assert (step.valid == ~done).all()
            assert not (done & step.valid).any()
            assert (env.episode_starts == ~step.valid).all()
            assert (step.reward[~step.valid] == 0).all()
            assert not ((step.terminated | step.truncated) & ~step.valid).any()
            assert np.isfinite(step.reward).all() and np.isfinite(step.obs).all()
            resets += int((~step.valid).sum())
            done = step.terminated | step.truncated
        assert resets > 0


def test_a_reset_discards_a_step_that_was_not_received(backend):
    with build(backend) as one, build(backend) as other:
        sequence = actions(one, 12)
        for env in (one, other):
            env.reset()
            play(env, sequence[:5])
        other.step(sequence[5])
        one.send(sequence[5])
        np.testing.assert_array_equal(one.reset(), other.reset())
        same(play(one, sequence[6:]), play(other, sequence[6:]))
        one.send(sequence[0])
        with pytest.raises(RuntimeError, match="send"):
            one.send(sequence[0])


def test_loading_discards_a_step_that_was_not_received(backend):
    with build(backend) as one, build(backend) as other:
        sequence = actions(one, 12)
        one.reset()
        play(one, sequence[:5])
        state = one.state_dict()
        other.load_state_dict(state)
        one.send(sequence[5])
        one.load_state_dict(state)
        np.testing.assert_array_equal(one.observation, other.observation)
        same(play(one, sequence[5:]), play(other, sequence[5:]))


def test_episode_statistics_sum_valid_steps(backend):
    if backend == "ale, lives":
        pytest.skip("its scores are those of whole games")
    with build(backend) as env:
        env.reset()
        sums, lengths, finished = np.zeros(ENVS), np.zeros(ENVS, int), 0
        for action in actions(env, timesteps_of(backend)):
            step = env.step(action)
            sums = np.where(step.valid, sums + step.reward, 0.0)
            lengths = np.where(step.valid, lengths + 1, 0)
            ended = np.flatnonzero(step.terminated | step.truncated).tolist()
            assert [episode.env for episode in step.episodes] == ended
            for episode in step.episodes:
                assert episode.return_ == pytest.approx(sums[episode.env])
                assert episode.length == lengths[episode.env]
            finished += len(ended)
        assert finished > 0


def test_seeds_determine_steps_and_environments_differ(backend):
    with build(backend) as one, build(backend) as again, build(backend, seed=1) as other:
        starts = [env.reset().copy() for env in (one, again, other)]
        timesteps = timesteps_of(backend) // 2
        first, second, third = (play(env, actions(env, timesteps)) for env in (one, again, other))
    np.testing.assert_array_equal(starts[0], starts[1])
    same(first, second)
    if backend != "batch":  # Counter ignores seeds
        assert any((a[0] != b[0]).any() for a, b in zip(first, third, strict=True))
        assert any((timestep[0][0] != timestep[0][1]).any() for timestep in first)


def test_the_state_holds_actions_of_running_episodes(backend):
    with build(backend) as env:
        env.reset()
        expected_actions = [[] for _ in range(ENVS)]
        for action in actions(env, timesteps_of(backend)):
            begins = env.episode_starts
            step = env.step(action)
            for index in range(ENVS):
                expected_actions[index] = ([] if begins[index] else expected_actions[index]) + [
                    action[index]
                ]
            known = env.state_dict()["actions"]
            if backend not in REPLAYED:
                assert known == {}
                continue
            for index in range(ENVS):
                expected = expected_actions[index] if step.valid[index] else []
                assert known[str(index)].tolist() == expected


@pytest.mark.parametrize("when", ["at reset", "mid-episode", "after an end", "after a reset"])
@pytest.mark.parametrize("stack", [1, 3])
def test_a_restored_state_continues_exactly_or_warns(backend, stack, when, caplog):
    exact = BACKENDS[backend][4]
    with build(backend, frame_stack=stack) as one, build(backend, frame_stack=stack) as other:
        sequence = actions(one, timesteps_of(backend))
        one.reset()
        done = play_until(when, one, sequence)
        state, seen, starts = one.state_dict(), one.observation.copy(), one.episode_starts.copy()
        other.load_state_dict(state)
        np.testing.assert_array_equal(other.observation, seen)
        rest = sequence[done:]
        if exact:
            np.testing.assert_array_equal(other.episode_starts, starts)
            same(play(other, rest), play(one, rest))
            assert "cannot be continued" not in caplog.text
        else:
            assert "cannot be continued" in caplog.text
            step = other.step(rest[0])
            assert not step.valid.any()
            assert step.episodes == ()
            assert other.episode_starts.all()
            assert other.step(rest[1]).valid.all()


def play_until(when, env, sequence):
    """Play until the given moment; return the number of timesteps."""
    if when == "at reset":
        return 0
    for timestep, action in enumerate(sequence[:-5], start=1):
        step = env.step(action)
        done = step.terminated | step.truncated
        happened = {
            "mid-episode": timestep > 1 and step.valid.all() and not done.any(),
            "after an end": done.any(),
            "after a reset": not step.valid.all(),
        }
        if happened[when]:
            return timestep
    raise AssertionError(f"never happened: {when}")
