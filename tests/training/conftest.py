"""Fixtures: a small file system, and checkpoints that are never skipped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from steadyrl.training.checkpoints.store import Checkpoints


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a mounted file system of 1 MB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def none_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a running save instead of skipping the next checkpoint."""
    monkeypatch.setattr(Checkpoints, "busy", property(Checkpoints.wait))
