"""Control groups with a memory limit, made where the test may; else the test is skipped."""

import contextlib
import os
import subprocess
import sys

import pytest
from command import ROOT, environment

from steadyrl.memory.bounds import control_groups

LIMIT = {"memory.usage_in_bytes": "memory.limit_in_bytes", "memory.current": "memory.max"}


@contextlib.contextmanager
def memory_group(limit):
    """Yield the directory of a new group below this process's, limited to so many bytes."""
    for own in control_groups():
        place = own.directory / f"steadyrl-test-{os.getpid()}"
        try:
            place.mkdir()
        except OSError:
            continue
        try:
            for usage, name in LIMIT.items():
                if (place / usage).exists():
                    (place / name).write_text(str(limit))
                    yield place
                    return
        finally:
            place.rmdir()
    pytest.skip("no control group of memory can be made here (needs root)")


def train_within(limit, folder, *overrides, ranks=0, **variables):
    """Train by the command in a group of `limit` bytes; return the finished process."""
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}") if ranks else ()
    train = (str(ROOT / "train.py"), *overrides, f"run_dir={folder / 'run'}")
    command = [sys.executable, *torchrun, *train]
    with memory_group(limit) as group:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment() | variables,
            capture_output=True,
            text=True,
            preexec_fn=lambda: enter(group),
        )


def enter(group):
    """Move this process into a group; a `preexec_fn`."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
