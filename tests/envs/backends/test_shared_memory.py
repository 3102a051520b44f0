"""Shared memory of worker processes that does not fit is refused before the first step."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from command import QUICK, ROOT, environment
from toy_environments import settings

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.envs.backends import worker_handle
from steadyrl.envs.backends.subprocess import ProcessBackend
from steadyrl.envs.factory import build_env

WIDE = {"kwargs": {"numbers": 50_000}}  # 200 KB a frame


def test_the_error_names_what_is_needed_and_what_is_free(monkeypatch):
    full = os.statvfs_result((4096, 4096, 100, 10, 10, 0, 0, 0, 0, 255))  # 10 blocks are free
    monkeypatch.setattr(worker_handle.os, "statvfs", lambda path: full)
    config = settings("hostile_envs:Hostile-v0", backend="async", num_envs=3, **WIDE)
    with pytest.raises(MemoryBudgetError) as refused:
        build_env(config, seed=0)
    message = str(refused.value)
    assert "shared memory of 3 environments needs 1.20 MB but 41.0 KB are free" in message
    assert "/dev/shm" in message and "--shm-size" in message and "env.backend=sync" in message


def test_without_such_a_directory_it_is_made_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(worker_handle, "SHARED_MEMORY", str(tmp_path / "nowhere"))
    backend = ProcessBackend(settings(backend="async", num_envs=1), seed=0)
    out, _ = backend.buffers()
    backend.start(out)
    backend.close()
    assert np.isfinite(out.obs).all()


def test_a_full_file_system_is_refused_in_one_line(tmp_path):
    mount = "mount -t tmpfs -o size=256k tmpfs /dev/shm"
    if not shutil.which("unshare") or subprocess.call(["unshare", "-m", "sh", "-c", mount]):
        pytest.skip("cannot mount a file system here (needs root)")
    ran = subprocess.run(
        [
            *("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"),
            *(sys.executable, str(ROOT / "train.py"), *QUICK, f"run_dir={tmp_path / 'run'}"),
            *("env.id=hostile_envs:Hostile-v0", "+env.kwargs={numbers: 50000}"),
            *("env.backend=async", "env.num_envs=2"),
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 7, ran.stderr
    (line,) = (line for line in ran.stderr.splitlines() if line.startswith("error:"))
    assert "shared memory of 2 environments needs 800 KB but 262 KB are free in /dev/shm" in line
    assert not (tmp_path / "run").exists()
