"""Metrics of several ranks: memory is summed, ratios are not, and all log the same steps."""

from __future__ import annotations

import json
from pathlib import Path

from forked_ranks import start

from steadyrl.training.distributed.run import is_summed


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
