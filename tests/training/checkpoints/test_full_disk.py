"""A run on a full disk continues, keeps its checkpoints and warns once."""

from __future__ import annotations

import os
from pathlib import Path

from warm import run

from steadyrl.training.checkpoints.store import Checkpoints

ARGUMENTS = (
    "run_dir=run", "resume=auto", "checkpoint.every=100", "log.every=100", "eval.every=0",
    "agent.replay.capacity=500",
)  # fmt: skip


def steps_saved(directory: Path) -> list[int]:
    return [saved.step for saved in Checkpoints(directory / "checkpoints", keep=2).candidates]


def fill(disk: Path, leave: int) -> Path:
    """Fill a disk up to `leave` bytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    path = disk / "filler"
    path.write_bytes(b"\1" * (free - leave))
    return path


def test_training_continues_on_a_full_disk_and_saves_later(small_disk: Path) -> None:
    directory, summary, _ = run(small_disk, *ARGUMENTS, "total_steps=300")
    assert (summary["status"], steps_saved(directory)[0]) == ("finished", 300)
    newest = directory / "checkpoints" / "step-000000000300"
    size = sum(file.stat().st_blocks * 512 for file in newest.iterdir())
    # Too little for another checkpoint; enough for the lines of metrics and the summary.
    filler = fill(small_disk, leave=size * 3 // 4)
    before = {file.name: file.read_bytes() for file in newest.iterdir()}

    _, summary, printed = run(small_disk, *ARGUMENTS, "total_steps=900", code=9)
    assert (summary["status"], summary["steps"]) == ("failed", 900)
    assert steps_saved(directory)[0] == 300
    assert {file.name: file.read_bytes() for file in newest.iterdir()} == before
    # One warning for all checkpoints; one each for the policy and a line of metrics, if these
    # do not fit while a checkpoint takes the last of the space.
    assert printed.count("warning: cannot write the checkpoint") == 1
    assert "cannot write the checkpoint of step 400" in printed
    others = sum(map(printed.count, ("policy/ cannot be", "warning: cannot write metrics")))
    report = printed.count("warning: cannot write report.html")  # once, if it does not fit either
    assert others <= 2 and report <= 1
    # What still fits of a line is taken back: "only 756 of 818 bytes were written".
    reasons = map(printed.count, ("No space left on device", "bytes were written"))
    assert sum(reasons) == 2 + others + report
    # The final error: what was not written, where, and how to continue.
    assert "error: step 900 was reached, but not written: the last checkpoint" in printed
    assert f"free on {small_disk}: free space and continue it with resume={directory}" in printed

    filler.unlink()
    _, summary, printed = run(small_disk, *ARGUMENTS, "total_steps=1000")
    assert summary["resumed_from_step"] == 300
    assert steps_saved(directory)[0] == 1000
    assert "cannot write" not in printed
