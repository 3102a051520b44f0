"""Runs with growing memory: limit, leak detection and profile."""

import json
import re

import pytest
import warm
from algorithms import NAMES, eager
from command import run

from steadyrl.training.checkpoints.manifest import saved_below, verified_metadata

# A run that is not stopped would grow by 1 GB.
SIZE = 400_000
HOARDER = (
    "env.id=broken_envs:Hoarder-v0",
    f"env.kwargs.size={SIZE}",
    "total_steps=2_500",
    "eval.every=0",
)
ALERT = (
    "memory.leak.action=stop",
    "memory.leak.warmup_samples=3",
    "memory.leak.max_growth_mb=16",
    "memory.monitor.every_seconds=0",
    "log.every=50",
)


def is_complete(summary):
    """Return whether the summary has every value of a stopped run."""
    known = ("return_mean", "steps_per_second", "wall_seconds", "rss_mb_peak", "episodes")
    return all(summary[key] for key in known) and len(summary["weights_sha256"]) == 64


def newest_checkpoint(directory):
    """Return the step of the newest checkpoint, after verifying it."""
    newest = saved_below(directory / "checkpoints")[0]
    assert verified_metadata(newest.path)["step"] == newest.step
    return newest.step


@pytest.mark.long
@pytest.mark.parametrize("agent", NAMES)
def test_a_growing_run_stops_at_its_memory_limit(tmp_path, agent):
    overrides = (*eager(agent), "device=cpu", "memory.limit_mb=700")
    directory, summary, printed = run(tmp_path, *HOARDER, *overrides, code=7, quick=False)
    (error,) = (line for line in printed.splitlines() if line.startswith("error:"))
    assert "memory.limit_mb=700 is reached" in error
    assert error.removeprefix("error: ") in (directory / "train.log").read_text()
    assert summary["status"] == "failed" and is_complete(summary)
    # The run grew before it was stopped, and was stopped at the limit: a little before, because
    # what grew over the last readings is expected to grow on, or soon after.
    grown_mb = summary["steps"] * SIZE / 1e6
    assert 100 < grown_mb < 700 and 0.85 * 700 < summary["rss_mb_peak"] < 1000
    assert newest_checkpoint(directory) == summary["steps"]


def test_a_leak_stops_the_run_with_its_owner(tmp_path):
    directory, summary, printed = warm.run(tmp_path, *HOARDER, *ALERT, code=7)
    (error,) = (line for line in printed.splitlines() if line.startswith("error:"))
    assert "host memory grew by" in error
    assert "broken_envs.Hoarder.kept: list" in error and "(bytes)" in error
    assert error.removeprefix("error: ") in (directory / "train.log").read_text()
    assert summary["status"] == "failed" and 0 < summary["steps"] < 1250
    assert is_complete(summary) and newest_checkpoint(directory) == summary["steps"]


def test_a_leak_in_a_worker_stops_the_run_with_the_workers_name(tmp_path):
    overrides = ("env.num_envs=2", "env.backend=async", "memory.monitor.tree_every_seconds=0")
    _, summary, printed = warm.run(tmp_path, *HOARDER, *ALERT, *overrides, code=7)
    (error,) = (line for line in printed.splitlines() if line.startswith("error:"))
    assert re.search(r"environment-[01] \(process \d+\): its memory grew by \d", error), error
    assert "env.backend=sync" in error
    assert summary["status"] == "failed" and 0 < summary["steps"] < 2_500


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("sync", r"host memory grew .*broken_envs\.Diary\.pages: list"),
        ("async", r"environment-[01] \(process \d+\): its memory grew by \d"),
    ],
)
def test_default_settings_find_a_leak_of_one_kilobyte_per_episode(tmp_path, backend, message):
    _, summary, printed = run(
        tmp_path,
        "env.id=broken_envs:Diary-v0",
        "env.num_envs=2",
        f"env.backend={backend}",
        "total_steps=2_000_000",
        "agent.train_every=1000",
        "memory.leak.action=stop",
        "memory.monitor.tree_every_seconds=1",  # 30 by default: the same in minutes
        "eval.every=0",
        "log.every=500",
        code=7,
    )
    (error,) = (line for line in printed.splitlines() if line.startswith("error:"))
    assert re.search(message, error), error
    assert 16e6 / 1024 < summary["steps"] < 1_000_000


def test_a_run_continues_when_memory_usage_cannot_be_read(tmp_path):
    directory, summary, printed = warm.run(
        tmp_path,
        "env.id=broken_envs:Glutton-v0",
        "env.kwargs={first: 600, last: 1500}",
        "memory.monitor.every_seconds=0",
        "memory.monitor.tree_every_seconds=0",
        "memory.limit_mb=50_000",
        "memory.profile=true",
        "log.every=100",
        "eval.every=0",
    )
    assert summary["status"] == "finished" and summary["steps"] == 2000
    (warning,) = (line for line in printed.splitlines() if "cannot read memory usage" in line)
    assert "Too many open files" in warning
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line for line in lines}
    assert "memory/tree_pss_mb" not in by_step[1000] and by_step[1000]["memory/rss_mb"] > 0
    assert "memory/tree_pss_mb" in by_step[500] and "memory/tree_pss_mb" in by_step[2000]


@pytest.mark.long
def test_the_memory_profile_names_tensors_with_graphs(tmp_path):
    command = (
        "agent=ppo",
        "agent.rollout_steps=4",
        "agent.minibatches=1",
        "agent.epochs=1",
        "agent.compile=false",
        "device=cpu",
        "total_steps=1000",
        "log.every=100",
        "eval.every=0",
        "memory.profile=true",
    )
    clean = warm.run(tmp_path, "env=cartpole", *command, quick=False)[2]
    planted = warm.run(tmp_path, "env.id=broken_envs:GraphKeeper-v0", *command, quick=False)[2]
    title = "tensors that keep their graph:"
    # 1000 steps are 250 rollouts: two tables on the way, and one at the end
    assert clean.count(title) == 3 and clean.count(f"{title}\n  none\n") == 3
    path = r"env\.\S*\.kept\[0\]: float32\[3\] on cpu with their graph, 12 bytes, 1 references\n"
    assert re.search(title + r"\n  " + path, planted)
