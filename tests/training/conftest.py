"""A disk that is really full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


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
