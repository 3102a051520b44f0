import math

import pytest

from steadyrl.envs.types import Episode
from steadyrl.training.run.episode_counter import LOGGED, EpisodeCounter


def test_each_episode_is_logged_once_with_the_recent_returns():
    episodes = EpisodeCounter(1000)
    assert episodes.pop_new() == ([], []) and episodes.scalars() == {}
    assert episodes.return_mean is None
    episodes.append(10, Episode(0, 1.0, 10))
    episodes.append(10, Episode(1, 3.0, 20))
    assert episodes.pop_new() == ([(10, 1.0), (10, 3.0)], [1.0, 3.0])
    assert episodes.pop_new() == ([], [])
    episodes.append(30, Episode(0, 5.0, 30))
    assert episodes.pop_new() == ([(30, 5.0)], [1.0, 3.0, 5.0])
    assert episodes.scalars() == {"rollout/return_mean": 3.0, "rollout/length_mean": 20.0}


def test_only_the_newest_of_many_episodes_are_logged():
    episodes = EpisodeCounter(1000)
    for step in range(500):
        episodes.append(step, Episode(0, float(step), 1))
    newest, returns = episodes.pop_new()
    assert newest == [(step, float(step)) for step in range(500 - LOGGED, 500)]
    assert returns == [float(step) for step in range(500)]  # as many as are kept
    assert episodes.count == 100 and episodes.return_mean == 449.5  # of the last 100


def test_the_window_of_the_means_is_a_setting():
    episodes = EpisodeCounter(1000, 3)
    for step in range(9):
        episodes.append(step, Episode(0, float(step), 2 * step))
    assert episodes.scalars() == {"rollout/return_mean": 7.0, "rollout/length_mean": 14.0}
    assert episodes.return_mean == 7.0 and episodes.count == 3


def test_a_short_history_logs_all_its_episodes():
    episodes = EpisodeCounter(3)
    for step in range(9):
        episodes.append(step, Episode(0, float(step), 1))
    assert episodes.pop_new() == ([(6, 6.0), (7, 7.0), (8, 8.0)], [6.0, 7.0, 8.0])


def test_info_metrics_are_means_over_episodes_that_have_them():
    episodes = EpisodeCounter(1000, 100, ("is_success", "never"))
    for success in (0.0, 1.0, 1.0):
        episodes.append(1, Episode(0, 2.0, 1, {"is_success": success}))
    episodes.append(1, Episode(0, 2.0, 1))
    scalars = episodes.scalars()
    assert scalars["rollout/info/is_success"] == pytest.approx(2 / 3)
    assert math.isnan(scalars["rollout/info/never"])  # NaN is not logged
    other = EpisodeCounter(1000, 100, ("is_success", "never"))
    other.load_state_dict(episodes.state_dict())
    assert other.scalars()["rollout/info/is_success"] == scalars["rollout/info/is_success"]


def test_unlogged_episodes_are_logged_after_resuming():
    saved = EpisodeCounter(1000)
    saved.append(10, Episode(0, 1.0, 10))
    saved.pop_new()
    saved.append(20, Episode(0, 2.0, 10))
    other = EpisodeCounter(1000)
    other.load_state_dict(saved.state_dict())
    assert other.pop_new() == saved.pop_new() == ([(20, 2.0)], [1.0, 2.0])


def test_the_mean_reward_is_over_the_steps_since_the_last_line():
    episodes = EpisodeCounter(3)
    episodes.total_reward = 6.0
    assert episodes.pop_reward_mean(4) == {"rollout/reward_mean": 1.5}
    episodes.total_reward = 5.0
    other = EpisodeCounter(3)
    other.load_state_dict(episodes.state_dict())
    assert other.pop_reward_mean(0) == {}  # nothing was stepped
    other.total_reward = 4.0
    assert other.pop_reward_mean(1) == {"rollout/reward_mean": -1.0}
