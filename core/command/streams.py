"""Standard streams that were closed before the program started (`2>&-`, some daemons)."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Open closed ones on /dev/null; else the next file opened would get what is written there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
