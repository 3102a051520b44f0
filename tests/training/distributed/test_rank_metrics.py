"""Metrics of several ranks: memory is summed, ratios are not."""

from __future__ import annotations

from steadyrl.training.distributed.run import is_summed


def test_memory_is_summed_over_ranks_and_the_replays_fill_is_not() -> None:
    assert is_summed("memory/rss_mb") and is_summed("memory/replay_mb")
    assert not is_summed("memory/replay_fill") and not is_summed("train/loss")
