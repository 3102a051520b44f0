"""Runs that leak below a real control group: saved, exit code 7, never killed."""

import json
import re

import pytest
from control_groups import train_within

from steadyrl.training.checkpoints.manifest import saved_below, verified_metadata

MB = 1_000_000
PLACES = {
    "sync": ("environment", "env.backend=sync"),
    "worker": ("environment", "env.backend=async", "env.num_envs=2"),
    "callback": ("callback", "env.backend=sync", "callbacks=[leaking_envs:LeakingCallback]"),
}
NEVER_ENDS = "total_steps=100_000_000"
NO_EVALUATION = "eval.every=0"  # its environments would leak as well


def train(folder, limit, rate, place, *overrides, at_start=0):
    """Train in a control group of `limit` MB; return exit code, output and run directory."""
    where, *chosen = PLACES[place]
    leak = {"LEAK_MB_PER_SECOND": str(rate), "LEAK_IN": where, "LEAK_MB_AT_START": str(at_start)}
    settings = ("device=cpu", *chosen, "env.id=leaking_envs:Leaking-v0", *overrides)
    process = train_within(limit * MB, folder, *settings, **leak, TMPDIR=str(folder))
    return process.returncode, process.stdout + process.stderr, folder / "run"


def assert_saved(code, text, run):
    """The run ended at its limit, with all that a resumed run and a reader need."""
    assert code == 7, text
    summary = json.loads((run / "summary.json").read_text())
    newest = saved_below(run / "checkpoints")[0]
    assert verified_metadata(newest.path)["step"] == newest.step == summary["steps"]
    assert verified_metadata(run / "policy")["step"] == summary["steps"]
    (error,) = (line for line in text.splitlines() if line.startswith("error:"))
    assert "the memory limit is reached" in error and "What grew since the start: " in error
    assert re.search(rf"^  go on: .*resume={re.escape(str(run))}", text, re.MULTILINE)


@pytest.mark.long
def test_a_leaking_run_in_a_control_group_is_saved_before_the_kernel_kills_it(tmp_path):
    ended = train(tmp_path, 600, 100, "sync", NEVER_ENDS, "agent.compile=false")
    assert_saved(*ended)
    (warning,) = (line for line in ended[1].splitlines() if "memory is near its limit" in line)
    assert "cgroup limit 600 MB" in warning and "This process holds" in warning


@pytest.mark.slow
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("rate", [1, 20, 200])
@pytest.mark.parametrize("limit", [800, 1500])
def test_leaks_end_with_7(tmp_path, limit, rate, place):
    # A slow leak begins a minute below the limit.
    at_start = {1: limit - 64 - 330, 20: max(0, limit - 1000), 200: 0}[rate]
    at_start = max(0, at_start // 2 - 50) if place == "worker" else at_start
    more = (NEVER_ENDS, NO_EVALUATION)
    assert_saved(*train(tmp_path, limit, rate, place, *more, at_start=at_start))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1, 20, 200])
def test_leaks_end_with_7_in_a_group_that_compiled_runs_fit_in(tmp_path, rate):
    warm, leaking = tmp_path / "warm", tmp_path / "leaking"
    warm.mkdir()
    leaking.mkdir()
    code, text, _ = train(warm, 1500, 0, "sync", "total_steps=3000")
    assert code == 0, text
    more = (NEVER_ENDS, NO_EVALUATION)
    assert_saved(*train(leaking, 500, rate, "sync", *more, at_start=120 * (rate == 1)))


@pytest.mark.slow
def test_an_evaluation_of_ranks_that_leaks_ends_with_7(tmp_path):
    few = ("env.num_envs=1", "eval.every=2000", "eval.episodes=1", "eval.max_episode_steps=1e9")
    process = train_within(
        1500 * MB, tmp_path, "device=cpu", "env.id=leaking_envs:LeakingEvaluation-v0",
        "env.backend=sync", "agent.compile=false", *few, NEVER_ENDS, ranks=2,
        LEAK_MB_PER_SECOND="50", LEAK_IN="environment", TMPDIR=str(tmp_path),
    )  # fmt: skip
    assert process.stderr.count("exitcode  : 7") == 2, process.stderr
    text = process.stdout + process.stderr
    assert re.search(r"error: (rank 0: )?the memory limit is reached", text), text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved_below(tmp_path / "run" / "checkpoints")[0].step == summary["steps"] >= 2000


@pytest.mark.slow
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("limit", [800, 1500])
def test_the_same_runs_without_a_leak_finish(tmp_path, limit, place):
    code, text, _ = train(tmp_path, limit, 0, place, "total_steps=12_000")
    assert code == 0, text
    assert "near its limit" not in text or limit == 800
