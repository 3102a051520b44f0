"""A directory of its own for every run, held by a lock while the run lives."""

from __future__ import annotations

import fcntl
import os
import uuid
from datetime import datetime
from pathlib import Path

from memory.errors import ExpectedError, SettingError

LOCK = ".lock"


class RunDirectoryInUseError(ExpectedError):
    """Another process holds the run directory."""

    exit_code = 6


def default_path(env: str, agent: str, seed: int) -> Path:
    """Name a directory that no other run has: microseconds, the seed and a short id."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
    safe = "".join(c if c.isalnum() or c in "-._" else "_" for c in env)
    return Path("outputs") / safe / agent / f"{stamp}-s{seed}-{uuid.uuid4().hex[:6]}"


class RunDirectory:
    """A locked run directory; released when closed or when the process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        # lockf and not flock: a worker process that outlives a killed run must not keep the lock.
        self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise RunDirectoryInUseError(
                f"run_dir={path}: another run is using this directory; choose another"
            ) from None
        if (path / "config.yaml").exists():
            self.close()
            raise SettingError("run_dir", path, "holds a run already; choose another directory")

    def close(self) -> None:
        """Let the directory go."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
