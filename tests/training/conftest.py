"""A disk that is really full, and one that no checkpoint is too slow for."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from steadyrl.training.checkpoints.store import Checkpoints


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
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
    """Let whoever asks whether a checkpoint is being written wait until it is."""
    monkeypatch.setattr(Checkpoints, "busy", property(Checkpoints.wait))
