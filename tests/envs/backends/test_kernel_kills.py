"""Workers that the kernel kills because memory ran out: named so, and the run is saved and ends."""

import itertools
import json

import numpy as np
import psutil
import pytest
from command import QUICK
from control_groups import train_within
from toy_environments import settings

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.envs.backends import worker_handle
from steadyrl.envs.factory import build_env

ZEROS = np.zeros(2, np.int64)


def count_up(monkeypatch):
    """Let the kernel's count of kills rise at each reading."""
    count = itertools.count()
    monkeypatch.setattr(worker_handle, "kernel_kills", lambda: next(count))


def two_workers():
    return build_env(settings(backend="async", num_envs=2, max_restarts=9), seed=0)


def kill_one():
    psutil.Process().children()[-1].kill()


def test_a_run_goes_on_until_it_is_saved_but_not_for_ever(monkeypatch):
    count_up(monkeypatch)
    with two_workers() as env:
        env.reset()
        env.step(ZEROS)
        assert env.memory_error is None
        kill_one()
        assert env.step(ZEROS).valid.tolist().count(False) >= 1
        assert "environment 1 failed at step 1: the kernel killed" in str(env.memory_error)
        assert env.step(ZEROS).valid.any()
        kill_one()
        with pytest.raises(MemoryBudgetError, match="because memory ran out"):
            env.step(ZEROS)


def test_before_the_first_step_it_is_an_error_at_once(monkeypatch):
    count_up(monkeypatch)
    with two_workers() as env:
        kill_one()
        with pytest.raises(MemoryBudgetError, match="because memory ran out"):
            env.reset()


def test_other_kills_are_failures_as_before():
    with two_workers() as env:
        env.reset()
        env.step(ZEROS)
        kill_one()
        env.step(ZEROS)
        assert env.memory_error is None


@pytest.mark.long
def test_a_run_whose_worker_is_killed_in_its_control_group_is_saved(tmp_path):
    ran = train_within(
        900_000_000,
        tmp_path,
        *(*QUICK, "env.id=broken_envs:Hoarder-v0", "+env.kwargs={size: 2000000}"),
        *("env.backend=async", "eval.every=0"),
        "memory.limit_mb=null",  # else the run ends before the kernel does anything
    )
    assert ran.returncode == 7, ran.stderr
    assert "environment 0 failed at step" in ran.stderr
    assert "the kernel killed the environment's process because memory ran out" in ran.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    newest = max(each.name for each in (tmp_path / "run/checkpoints").glob("step-*"))
    assert summary["status"] == "failed" and summary["steps"] > 100
    assert int(newest.removeprefix("step-")) == summary["steps"]
