"""Runs that leak below a real control group: saved, exit code 7, never killed."""

import json
import os
import re
import subprocess
import sys

import pytest
from control_groups import enter, memory_group

from steadyrl.training.checkpoints.manifest import saved_below, verified_metadata

MB = 1_000_000
PLACES = {
    "sync": ("environment", "env.backend=sync"),
    "worker": ("environment", "env.backend=async", "env.num_envs=2"),
    "callback": ("callback", "env.backend=sync", "callbacks=[leaking_envs:LeakingCallback]"),
}
NEVER_ENDS = "total_steps=100_000_000"


def train(request, folder, limit, rate, place, *overrides, at_start=0):
    """Train in a control group of `limit` MB; return exit code, output and run directory."""
    where, *chosen = PLACES[place]
    command = [sys.executable, str(request.config.rootpath / "train.py"), "device=cpu", *chosen]
    command += ["env.id=leaking_envs:Leaking-v0", f"run_dir={folder / 'run'}", *overrides]
    leak = {"LEAK_MB_PER_SECOND": str(rate), "LEAK_IN": where, "LEAK_MB_AT_START": str(at_start)}
    paths = {"PYTHONPATH": str(request.config.rootpath / "tests/helpers"), "TMPDIR": str(folder)}
    with memory_group(limit * MB) as group:
        process = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **leak, **paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            preexec_fn=lambda: enter(group),
        )
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


def test_a_leaking_run_in_a_control_group_is_saved_before_the_kernel_kills_it(request, tmp_path):
    ended = train(request, tmp_path, 600, 100, "sync", NEVER_ENDS, "agent.compile=false")
    assert_saved(*ended)
    (warning,) = (line for line in ended[1].splitlines() if "memory is near its limit" in line)
    assert "cgroup limit 600 MB" in warning and "This process holds" in warning


@pytest.mark.slow
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("rate", [1, 20, 200])
@pytest.mark.parametrize("limit", [800, 1500])
def test_leaks_end_with_7(request, tmp_path, limit, rate, place):
    # A slow leak begins a minute below the limit.
    at_start = {1: limit - 64 - 330, 20: max(0, limit - 1000), 200: 0}[rate]
    at_start = at_start // 2 - 50 if place == "worker" else at_start
    assert_saved(*train(request, tmp_path, limit, rate, place, NEVER_ENDS, at_start=at_start))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1, 20, 200])
def test_leaks_end_with_7_in_a_group_that_compiled_runs_fit_in(request, tmp_path, rate):
    warm = train(request, tmp_path, 1500, 0, "sync", "total_steps=3000", "run_dir=warm")
    assert warm[0] == 0, warm[1]
    more = (NEVER_ENDS, "eval.every=0")
    assert_saved(*train(request, tmp_path, 500, rate, "sync", *more, at_start=120 * (rate == 1)))


@pytest.mark.slow
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("limit", [800, 1500])
def test_the_same_runs_without_a_leak_finish(request, tmp_path, limit, place):
    code, text, _ = train(request, tmp_path, limit, 0, place, "total_steps=12_000")
    assert code == 0, text
    assert "near its limit" not in text or limit == 800
