"""EnvPool's rows keep to the timeline."""

from __future__ import annotations

import numpy as np
import pytest
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.envs.factory import build_env, probe

pytest.importorskip("envpool")


def pool(env_id="CartPole-v1", **changes):
    return settings(env_id, **{"backend": "envpool", "num_envs": 2, **changes})


def play(env, rows):
    return [[a.copy() for a in env.step(np.ones(2, np.int64))[:5]] for _ in range(rows)]


def test_rows_after_an_end_are_resets_and_seeds_decide():
    with build_env(pool(), seed=1) as one, build_env(pool(), seed=1) as other:
        np.testing.assert_array_equal(one.reset(), other.reset())
        rows = play(one, 60)
        for ours, theirs in zip(rows, play(other, 60), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)
        ended = np.zeros(2, bool)
        for obs, reward, terminated, truncated, valid in rows:
            assert (valid == ~ended).all()
            assert (reward == valid).all()
            assert (np.abs(obs[~valid]) <= 0.05).all()
            ended = terminated | truncated


def test_a_state_taken_before_the_start_repeats_the_start_and_others_are_cut():
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


def test_atari_gives_one_frame_a_row():
    assert probe(pool("Pong-v5", frame_stack=4)).frame_shape == (1, 84, 84)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "reason"),
    [("CartPol-v1", {}, "did you mean CartPole-v1"), ("Pong-v5", {"foo": 1}, "kwargs.foo=1")],
)
def test_what_it_does_not_have_is_refused(env_id, kwargs, reason):
    with pytest.raises(SettingError, match=reason):
        probe(pool(env_id, kwargs=kwargs))
