"""EnvPool's steps fulfil the contract of VectorEnv."""

from __future__ import annotations

import numpy as np
import pytest
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.envs.factory import build_env, probe

pytest.importorskip("envpool")


def pool(env_id="CartPole-v1", **changes):
    return settings(env_id, **{"backend": "envpool", "num_envs": 2, **changes})


def play(env, timesteps):
    return [[a.copy() for a in env.step(np.ones(2, np.int64))[:5]] for _ in range(timesteps)]


def test_seeds_determine_steps_and_episode_ends_are_followed_by_resets():
    with build_env(pool(), seed=1) as one, build_env(pool(), seed=1) as other:
        np.testing.assert_array_equal(one.reset(), other.reset())
        timesteps = play(one, 60)
        for ours, theirs in zip(timesteps, play(other, 60), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)
        ended = np.zeros(2, bool)
        for obs, reward, terminated, truncated, valid in timesteps:
            assert (valid == ~ended).all()
            assert (reward == valid).all()
            assert (np.abs(obs[~valid]) <= 0.05).all()
            ended = terminated | truncated


def test_a_state_saved_before_reset_repeats_it_and_later_ones_cut():
    with build_env(pool(), seed=1) as env:
        start = env.state_dict()
        first = env.reset().copy()
        play(env, 5)
        later = env.state_dict()
        env.load_state_dict(start)
        np.testing.assert_array_equal(env.reset(), first)
        env.load_state_dict(later)
        assert not play(env, 1)[0][4].any()
        assert play(env, 1)[0][4].all()


def test_atari_gives_one_frame_per_step():
    assert probe(pool("Pong-v5", frame_stack=4)).frame_shape == (1, 84, 84)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "reason"),
    [("CartPol-v1", {}, "did you mean CartPole-v1"), ("Pong-v5", {"foo": 1}, "kwargs.foo=1")],
)
def test_unknown_ids_and_keywords_are_rejected(env_id, kwargs, reason):
    with pytest.raises(SettingError, match=reason):
        probe(pool(env_id, kwargs=kwargs))


@pytest.mark.parametrize("env_id", ["maze:Maze-v0", "Nothing-v9"])
def test_an_unknown_id_gets_no_hint_about_modules(env_id):
    with pytest.raises(SettingError) as caught:
        probe(pool(env_id))
    assert "not in EnvPool" in str(caught.value) and "module" not in str(caught.value)
