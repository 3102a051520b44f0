"""Whether a run's directory is locked, as another process sees it."""

import subprocess
import sys
from pathlib import Path

LOOK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def is_locked(run: Path) -> bool:
    """Return whether another process cannot lock the run's directory."""
    found = subprocess.run([sys.executable, "-c", LOOK, run / ".lock"], capture_output=True)
    assert found.returncode == 0 or b"BlockingIOError" in found.stderr
    return found.returncode != 0
