"""Atari steps have raw rewards and single frames; a lost life ends an episode, not the game."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.envs.factory import build_env, probe
from steadyrl.envs.registration import ATARI
from steadyrl.envs.rendering.atari import ale_kwargs
from steadyrl.envs.types import DiscreteActions
from steadyrl.training.evaluation.recording import RecordedEnvs, play_episodes

ale = pytest.importorskip("ale_py.vector_env")
BREAKOUT = "ALE/Breakout-v5"


def game(env_id=BREAKOUT, **changes):
    kwargs = {"num_threads": 1, "repeat_action_probability": 0.0, **changes.pop("kwargs", {})}
    return settings(env_id, **{"backend": "ale", "kwargs": kwargs, **changes})


def test_steps_equal_those_of_ale():
    rng = np.random.default_rng(0)
    with build_env(game(num_envs=2, kwargs={"episodic_life": False}), seed=0) as env:
        obs = env.reset()
        ale_env = env._backend.env
        seen = []
        recv = ale_env.recv
        ale_env.recv = lambda: seen.append(recv()) or seen[-1]
        assert obs.shape == (2, 1, 84, 84)
        done = np.zeros(2, bool)
        scores, finished = np.zeros(2), []
        for _ in range(500):
            step = env.step(rng.integers(0, 4, 2))
            frames, reward, terminated, truncated, _ = seen.pop()
            np.testing.assert_array_equal(step.obs, frames)
            np.testing.assert_array_equal(step.reward, reward)
            np.testing.assert_array_equal(step.terminated, terminated)
            np.testing.assert_array_equal(step.valid, ~done)
            done = terminated | truncated
            scores += reward
            for i in np.flatnonzero(done):
                finished.append(scores[i])
                scores[i] = 0
            assert [e.return_ for e in step.episodes] == finished[len(finished) - done.sum() :]
        assert len(finished) >= 2


def test_a_lost_life_ends_the_episode_but_not_the_game():
    rng = np.random.default_rng(1)
    with build_env(game(kwargs={"episodic_life": True}), seed=0) as env:
        env.reset()
        ale_env, sent, infos = env._backend.env, [], []
        send, recv = ale_env.send, ale_env.recv

        def record_send(buttons):
            sent.append(buttons.copy())
            send(buttons)

        def record_recv():
            infos.append(recv())
            return infos[-1]

        ale_env.send, ale_env.recv = record_send, record_recv
        ends = games = valid = 0
        score = 0.0
        after_end = after_life = False
        for _ in range(1500):
            step = env.step(rng.integers(0, 4, 1))
            _, reward, game_over, _, info = infos[-1]
            score += reward[0]
            assert step.valid[0] == (not after_end)
            valid += step.valid[0]
            if after_life:
                assert sent[-1].tolist() == [1]  # FIRE starts the next ball
                assert info["episode_frame_number"][0] > 30  # the same game continues
            after_life = bool(step.terminated[0]) and not game_over[0]
            after_end = bool(step.terminated[0])
            ends += after_end
            assert bool(step.episodes) == bool(game_over[0])
            if step.episodes:
                games += 1
                assert step.episodes[0].return_ == score
                assert step.episodes[0].length == valid
                score, valid = 0.0, 0
        assert games >= 1
        assert ends >= 5 * games


def test_rewards_are_not_clipped():
    rng = np.random.default_rng(0)
    with build_env(game("ALE/BeamRider-v5"), seed=0) as env:
        env.reset()
        rewards = {float(env.step(rng.integers(0, 9, 1)).reward[0]) for _ in range(600)}
    assert max(rewards) > 1


@pytest.fixture
def own_id(monkeypatch):
    """Return a function that registers an id of the user's own for Breakout."""
    monkeypatch.setattr(gym.envs.registration, "registry", {**gym.registry})

    def register(name, **registered):
        limit = registered.pop("max_episode_steps", None)
        kwargs = {"game": "breakout", **registered}
        gym.register(name, entry_point=ATARI, max_episode_steps=limit, kwargs=kwargs)
        return name

    return register


def test_an_own_id_has_its_keywords_below_those_of_the_settings(own_id):
    own = {"frameskip": 2, "repeat_action_probability": 0.5, "max_num_frames_per_episode": 300}
    mine = own_id("MyBreakout-v0", **own, full_action_space=True)
    chosen = {"num_threads": 1, "repeat_action_probability": 0.25, "noop_max": 5}
    expected = {**own, **chosen, "full_action_space": True}
    rng = np.random.default_rng(0)
    with (
        build_env(settings(mine, backend="ale", kwargs=chosen), seed=3) as one,
        build_env(settings(BREAKOUT, backend="ale", kwargs=expected), seed=3) as other,
    ):
        assert one.spec.action == DiscreteActions(18)
        np.testing.assert_array_equal(one.reset(), other.reset())
        ended = 0
        for _ in range(200):
            action = rng.integers(0, 18, 1)
            here, there = one.step(action), other.step(action)
            np.testing.assert_array_equal(here.obs, there.obs)
            assert here.truncated == there.truncated
            ended += bool(here.truncated[0])
    assert ended


@pytest.mark.parametrize("name", ["ALE/Pong-v5", "Pong-v0", "PongNoFrameskip-v4"])
def test_the_ids_of_ale_name_the_game_only(name):
    assert ale_kwargs(settings(name, kwargs={"noop_max": 5})) == {"game": "pong", "noop_max": 5}


@pytest.mark.parametrize(
    "registered", [{"mode": 4}, {"obs_type": "ram"}, {"noop_max": 5}, {"max_episode_steps": 100}]
)
def test_an_own_id_with_a_keyword_that_would_be_lost_is_rejected(own_id, registered):
    [(key, value)] = registered.items()
    with pytest.raises(SettingError, match=f"registered with {key}={value!r}") as caught:
        probe(game(own_id("MyBreakout-v0", **registered)))
    assert caught.value.field == "id"


def test_time_limits_truncate():
    config = game(kwargs={"max_num_frames_per_episode": 80, "episodic_life": True})
    with build_env(config, seed=0) as env:
        env.reset()
        steps = [env.step(np.zeros(1, np.int64)) for _ in range(20)]
        truncated = [bool(env.step(np.zeros(1, np.int64)).truncated[0]) for _ in range(21)]
    assert steps[-1].episodes[0].length == 20
    assert [i for i, done in enumerate(truncated) if done] == [20]  # after a reset and 20 steps


def test_a_life_lost_as_the_time_is_up_is_a_termination():
    """Seed 0 loses a life of Breakout in its 24th step: the ball is served and nobody moves."""
    ends = []
    for frames in (96, 97):
        lives = {"episodic_life": True, "max_num_frames_per_episode": frames}
        with build_env(game(kwargs=lives), seed=0) as env:
            env.reset()
            *_, last = [env.step(np.full(1, not i)) for i in range(24)]
            ends.append((last.terminated.tolist(), last.truncated.tolist()))
    assert ends == [([True], [True]), ([True], [False])]


def test_send_and_receive_equal_step():
    rng = np.random.default_rng(0)
    with (
        build_env(game(num_envs=2, frame_stack=4), seed=5) as one,
        build_env(game(num_envs=2, frame_stack=4), seed=5) as other,
    ):
        np.testing.assert_array_equal(one.reset(), other.reset())
        for _ in range(100):
            action = rng.integers(0, 4, 2)
            one.send(action)
            before = one.observation.copy()
            ale_env = other.step(action)
            np.testing.assert_array_equal(one.observation, before)
            for a, b in zip(one.receive(), ale_env, strict=True):
                np.testing.assert_array_equal(a, b)


def test_restoring_starts_a_new_game_with_a_warning(caplog):
    with build_env(game(num_envs=2, frame_stack=2), seed=0) as env:
        env.reset()
        for _ in range(10):
            env.step(np.ones(2, np.int64))
        state, seen = env.state_dict(), env.observation.copy()
        with build_env(game(num_envs=2, frame_stack=2), seed=0) as other:
            other.load_state_dict(state)
            np.testing.assert_array_equal(other.observation, seen)
            assert "starts new ones" in caplog.text
            cut = other.step(np.ones(2, np.int64))
            assert not (cut.valid | cut.terminated | cut.truncated).any()
            np.testing.assert_array_equal(cut.obs[:, 0], cut.obs[:, 1])
            assert other.step(np.ones(2, np.int64)).valid.all()


def test_a_state_saved_before_reset_repeats_the_reset():
    with build_env(game(), seed=0) as env:
        start = env.state_dict()
        first = env.reset().copy()
        env.step(np.ones(1, np.int64))
        env.load_state_dict(start)
        np.testing.assert_array_equal(env.reset(), first)


def test_colour_channels_come_first():
    with build_env(game(kwargs={"grayscale": False}), seed=0) as env:
        obs = env.reset()
        assert obs.shape == (1, 3, 84, 84)
        assert len({obs[0, c].tobytes() for c in range(3)}) > 1


def test_threads_end_with_the_environment():
    before = psutil.Process().num_threads()
    env = build_env(game(num_envs=2, kwargs={"num_threads": 2}), seed=0)
    env.reset()
    assert psutil.Process().num_threads() > before
    env.close()
    assert psutil.Process().num_threads() == before


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"backend": "sync"}, "backend", "ale or envpool"),
        ({"kwargs": {"stack_num": 4}}, "kwargs.stack_num", "env.frame_stack"),
        ({"kwargs": {"game": "breakout"}}, "kwargs.game", "env.id names it"),
        ({"kwargs": {"reward_clipping": True}}, "kwargs.reward_clipping", "score stays raw"),
        ({"kwargs": {"sticky": 1}}, "kwargs.sticky", "no such keyword argument"),
        ({"env_id": "ALE/Breakot-v5"}, "id", "did you mean ALE/Breakout-v5"),
        ({"env_id": "CartPole-v1"}, "backend", "not an Atari game"),
    ],
)
def test_invalid_atari_settings_are_rejected(changes, field, reason):
    with pytest.raises(SettingError, match=reason) as caught:
        probe(game(**changes))
    assert caught.value.field == field


def test_a_keyword_of_the_wrong_type_is_rejected_in_plain_words():
    with pytest.raises(SettingError, match="a type that ALE does not accept") as caught:
        probe(settings("ALE/Pong-v5", backend="ale", kwargs={"noop_max": "abc"}))
    assert caught.value.field == "kwargs"


def test_an_action_out_of_range_raises():
    with build_env(game(), seed=0) as env:
        env.reset()
        with pytest.raises(ValueError, match="outside 0…3"):
            env.send(np.array([4]))


def test_evaluation_plays_whole_games():
    config = game(kwargs={"episodic_life": True})
    assert config.for_evaluation().kwargs["episodic_life"] is False
    assert vars(settings().for_evaluation()) == vars(settings()) | {"continues_after_life": False}
    assert probe(config).action == DiscreteActions(4)


def lost_lives(env, steps):
    """Return how many games end if nothing is pressed, and their returns and lengths."""
    env.reset()
    episodes = []
    for _ in range(steps):
        episodes += env.step(np.zeros(1, np.int64)).episodes
    return episodes


def test_evaluation_presses_fire_after_a_lost_life_as_training_does():
    """Otherwise a policy that never saw the wait for FIRE would wait to the step limit."""
    lives = game(kwargs={"episodic_life": True})
    with build_env(lives.for_evaluation(), seed=0) as env:
        episodes = lost_lives(env, 800)
    assert len(episodes) >= 2  # games of five lives
    with build_env(game(kwargs={"episodic_life": False}).for_evaluation(), seed=0) as env:
        assert lost_lives(env, 800) == []  # the first life only


class Waiting:
    """Presses nothing."""

    def act(self, obs, starts):
        return SimpleNamespace(env_action=torch.zeros(len(obs), dtype=torch.int64))


def test_recorded_actions_repeat_a_game_of_several_lives():
    lives, games = game(kwargs={"episodic_life": True}).for_evaluation(), []
    with closing(RecordedEnvs(lives, seed=0, num_envs=1)) as envs:
        play_episodes(envs, Waiting(), [1], max_episode_steps=1000, write=games.append)
    [recorded] = games
    with build_env(game(kwargs={"episodic_life": False}), seed=0) as env:
        env.reset()
        over = [bool(env.step(action[None]).terminated[0]) for action in recorded["actions"]]
    assert over == recorded["terminated"].tolist()
