"""`resume=last`: the newest run in outputs/ that is neither finished nor in use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from warm import run

from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.checkpoints.resume import find_last

HOLD = (
    "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
    "print('locked', flush=True); sys.stdin.read()"
)


def made(folder: Path, name: str, age: int, status: str | None) -> Path:
    """Return a run directory that was begun `age` seconds before others."""
    directory = folder / "CartPole-v1" / "dqn" / name
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "config.yaml").write_text("{}\n")
    os.utime(directory / "config.yaml", (1e9 - age, 1e9 - age))
    if status is not None:
        (directory / "summary.json").write_text(f'{{"status": "{status}", "steps": 7}}')
    return directory


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Have another process hold the lock of a run."""
    command = [sys.executable, "-c", HOLD, str(directory / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        yield
        assert holder.stdin is not None
        holder.stdin.close()


def test_finished_runs_and_runs_in_use_are_passed_over(tmp_path: Path) -> None:
    made(tmp_path, "a", 9, None)
    interrupted = made(tmp_path, "z", 3, "interrupted")
    running = made(tmp_path, "b", 2, None)
    made(tmp_path, "c", 1, "finished")
    assert find_last(tmp_path) == running
    with in_use(running):
        assert find_last(tmp_path) == interrupted


def test_without_such_a_run_the_newest_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"resume=last: there is no run in "):
        find_last(tmp_path)
    newest = made(tmp_path, "c", 1, "finished")
    with pytest.raises(CheckpointError, match=r"every run in .* is finished or in use") as refused:
        find_last(tmp_path)
    assert f"resume={newest}  # finished, 7 steps" in str(refused.value)


def test_an_interrupted_run_goes_on_without_its_name(tmp_path: Path) -> None:
    directory = run(tmp_path, "total_steps=300", "eval.every=0")[0]
    (directory / "summary.json").unlink()  # as if killed
    other, summary, out = run(tmp_path, "total_steps=400", "resume=last", quick=False)
    assert (other, summary["steps"]) == (directory, 400), out
    assert "resumed from step 300" in out
    refusal = run(tmp_path, "resume=last", quick=False, code=3)[2]
    assert refusal.startswith("error: resume=last: every run in ")
