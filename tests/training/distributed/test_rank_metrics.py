"""Metrics of several ranks: memory is summed, ratios are not, and all log the same steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

from forked_ranks import start

from steadyrl.training.distributed.run import combined, is_summed, weighted


def test_memory_is_summed_over_ranks_but_not_replay_fill() -> None:
    assert is_summed("memory/rss_mb") and is_summed("memory/replay_mb")
    assert not is_summed("memory/replay_fill") and not is_summed("train/loss")


def test_ranks_with_different_clocks_log_the_same_steps(tmp_path: Path) -> None:
    """Logging is collective: a rank that logged alone would wait for ever."""
    overrides = ("env.id=skewed_clock:Skewed-v0", "env.num_envs=2", "log.every=20", "run_dir=run")
    ranks = start(tmp_path, 2, *overrides, "eval.every=0", "total_steps=1000")
    assert all(rank.is_over(within=120) for rank in ranks)
    assert [rank.wait() for rank in ranks] == [0, 0]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["step"] == 20


def test_the_mean_reward_is_over_the_steps_of_all_ranks(tmp_path: Path) -> None:
    """Twenty steps are five timesteps of two environments on two ranks: rewards 1 to 5, 6 to 10."""
    overrides = ("env.id=endless_env:Endless-v0", "env.num_envs=2", "log.every=20", "run_dir=run")
    ranks = start(tmp_path, 2, *overrides, "eval.every=0", "total_steps=100")
    assert [rank.wait() for rank in ranks] == [0, 0]
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["rollout/reward_mean"] for line in lines}
    assert found == {20: 3.0, 40: 8.0, 60: 13.0, 80: 18.0, 100: 23.0}


def test_ratios_are_averaged_and_what_is_available_is_that_of_the_fullest() -> None:
    assert combined("memory/rss_mb", [1.0, 2.0]) == 3.0
    assert combined("memory/cuda_utilization_percent", [90.0, 80.0]) == 85.0
    assert combined("memory/available_mb", [5.0, 2.0]) == 2.0


def test_a_rank_without_reports_hides_no_mean() -> None:
    one = (3, {"rollout/return_mean": 1.0, "rollout/info/goal": math.nan})
    other = (1, {"rollout/return_mean": 5.0, "rollout/info/goal": 7.0})
    assert weighted([one, other]) == {"rollout/return_mean": 2.0, "rollout/info/goal": 7.0}
