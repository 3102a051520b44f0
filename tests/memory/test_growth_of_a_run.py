"""A run that grows ends by itself, and what it leaves behind says how far it came."""

import pytest
from command import run

# Were it not stopped, it would keep 1 GB.
SIZE = 100_000
HOARDER = (
    "env.id=broken_envs:Hoarder-v0",
    f"env.kwargs.size={SIZE}",
    "total_steps=10_000",
    "eval.every=0",
)
ALERT = (
    "memory.leak.action=stop",
    "memory.leak.warmup_samples=3",
    "memory.leak.max_growth_mb=16",
    "memory.monitor.every_seconds=0",
    "log.every=200",
)


@pytest.mark.parametrize("agent", ["dqn", "ppo"])
def test_it_stops_at_its_limit(tmp_path, agent):
    overrides = (f"agent={agent}", "device=cpu", "agent.compile=false", "memory.limit_mb=700")
    directory, summary, printed = run(tmp_path, *HOARDER, *overrides, code=7, quick=False)
    (error,) = (line for line in printed.splitlines() if line.startswith("error:"))
    assert "memory.limit_mb=700 is reached" in error
    assert error.removeprefix("error: ") in (directory / "train.log").read_text()
    assert summary["status"] == "failed"
    # It grew before it was stopped, and was stopped soon after the limit.
    kept = summary["steps"] * SIZE / 1e6
    assert 100 < kept < 700 < summary["rss_mb_peak"] < 1000


def test_a_leak_is_named_and_stops_it_where_that_is_asked_for(tmp_path):
    directory, summary, printed = run(tmp_path, *HOARDER, *ALERT, code=7)
    (error,) = (line for line in printed.splitlines() if line.startswith("error:"))
    assert "host memory grew by" in error
    assert "broken_envs.Hoarder.kept: list" in error and "(bytes)" in error
    assert error.removeprefix("error: ") in (directory / "train.log").read_text()
    assert summary["status"] == "failed" and 0 < summary["steps"] < 5000
