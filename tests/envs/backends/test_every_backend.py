"""What every backend keeps: rows, validity, statistics, known actions, seeds, states, starts."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from toy_environments import settings

from steadyrl.envs.factory import build_env

ENVS = 2
# backend → (environment, its keywords, module it needs, rows that hold several episodes, exact?)
BACKENDS = {
    "sync": ("toy_environments:Counter-v0", {}, "gymnasium", 40, True),
    "async": ("toy_environments:Counter-v0", {}, "gymnasium", 40, True),
    "native": ("toy_environments:Counter-v0", {"length": 3}, "gymnasium", 40, True),
    "native, CartPole": ("CartPole-v1", {}, "gymnasium", 120, True),
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
REPLAYED = ("sync", "async")  # whose episodes are started again with their seed and actions


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


def rows_of(backend):
    return BACKENDS[backend][3]


def actions(env, rows, seed=0):
    return np.random.default_rng(seed).integers(0, env.spec.action.n, (rows, env.spec.num_envs))


def copy(step):
    return [array.copy() for array in step[:5]] + [step.episodes]


def same(one, other):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def play(env, sequence):
    return [copy(env.step(action)) for action in sequence]


@pytest.mark.parametrize("stack", [1, 3])
def test_rows_keep_the_timeline(backend, stack):
    with build(backend, frame_stack=stack) as env:
        obs, spec = env.reset(), env.spec
        assert env.episode_starts.tolist() == [True] * ENVS
        over, kept, resets = np.zeros(ENVS, bool), None, 0
        for action in actions(env, rows_of(backend)):
            step = env.step(action)
            if kept is not None:  # arrays stay untouched until the second step after
                same([kept[0]], [kept[1]])
            kept = (step[:5], copy(step)[:5])
            assert env.observation is step.obs
            assert step.obs.shape == obs.shape == (ENVS, *spec.observation_shape)
            assert (step.obs.dtype, step.reward.dtype) == (np.dtype(spec.dtype), np.float32)
            assert {flags.dtype for flags in step[2:5]} == {np.dtype(bool)}
            if "lives" not in backend:  # there rows after a lost life are not valid, either
                assert (step.valid == ~over).all()
            assert not (over & step.valid).any()
            assert (env.episode_starts == ~step.valid).all()
            assert (step.reward[~step.valid] == 0).all()
            assert not ((step.terminated | step.truncated) & ~step.valid).any()
            assert np.isfinite(step.reward).all() and np.isfinite(step.obs).all()
            resets += int((~step.valid).sum())
            over = step.terminated | step.truncated
        assert resets > 0


def test_episodes_are_the_sums_of_their_valid_rows(backend):
    if backend == "ale, lives":
        pytest.skip("its scores are those of whole games")
    with build(backend) as env:
        env.reset()
        sums, lengths, finished = np.zeros(ENVS), np.zeros(ENVS, int), 0
        for action in actions(env, rows_of(backend)):
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


def test_seeds_decide_and_environments_differ(backend):
    with build(backend) as one, build(backend) as again, build(backend, seed=1) as other:
        starts = [env.reset().copy() for env in (one, again, other)]
        rows = rows_of(backend) // 2
        first, second, third = (play(env, actions(env, rows)) for env in (one, again, other))
    np.testing.assert_array_equal(starts[0], starts[1])
    same(first, second)
    if backend != "native":  # its counter knows no seed
        assert any((a[0] != b[0]).any() for a, b in zip(first, third, strict=True))
        assert any((row[0][0] != row[0][1]).any() for row in first)


def test_the_actions_of_episodes_under_way_are_known(backend):
    with build(backend) as env:
        env.reset()
        told = [[] for _ in range(ENVS)]
        for action in actions(env, rows_of(backend)):
            begins = env.episode_starts
            step = env.step(action)
            for index in range(ENVS):
                told[index] = ([] if begins[index] else told[index]) + [action[index]]
            known = env.state_dict()["actions"]
            if backend not in REPLAYED:
                assert known == {}
                continue
            for index in range(ENVS):
                expected = told[index] if step.valid[index] else []
                assert known[str(index)].tolist() == expected


@pytest.mark.parametrize(
    "when", ["at the start", "in mid-episode", "after an end", "after a reset"]
)
@pytest.mark.parametrize("stack", [1, 3])
def test_a_state_goes_on_or_says_that_it_cannot(backend, stack, when, caplog):
    exact = BACKENDS[backend][4]
    with build(backend, frame_stack=stack) as one, build(backend, frame_stack=stack) as other:
        sequence = actions(one, rows_of(backend))
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
    """Play until the moment comes; return how many rows that took."""
    if when == "at the start":
        return 0
    for row, action in enumerate(sequence[:-5], start=1):
        step = env.step(action)
        over = step.terminated | step.truncated
        come = {
            "in mid-episode": row > 1 and step.valid.all() and not over.any(),
            "after an end": over.any(),
            "after a reset": not step.valid.all(),
        }
        if come[when]:
            return row
    raise AssertionError(f"{when}: never came")
