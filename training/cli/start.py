"""Start a program: its standard streams, import path, signals, and the packages it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steadyrl.core.command.interrupt import end_on_interrupt
from steadyrl.core.command.packages import required_packages
from steadyrl.core.command.streams import open_standard_streams

ROOT = str(Path(__file__).parents[3])  # of the checkout, or site-packages


@contextmanager
def started() -> Iterator[None]:
    """Run a program inside: a missing package is one line, and a signal ends it."""
    open_standard_streams()
    end_on_interrupt()  # before anything slow is imported
    with required_packages():
        from steadyrl.core.errors import exit_on_error
        from steadyrl.training.run.signals import ended_by_signals

        with exit_on_error():
            search_callers_directory_first()
        with ended_by_signals():
            yield


def search_callers_directory_first() -> None:
    """Put the current directory first on sys.path, and a checkout's root last.

    A checkout has top-level folders `agents` and `envs`, which would shadow users' modules. Its
    root stays on the path for spawned processes, unless another `steadyrl` is installed.
    """
    here = working_directory()
    rest = [path for path in sys.path if path not in (ROOT, "", here)]
    installed = [i for i, path in enumerate(rest) if os.path.isdir(os.path.join(path, "steadyrl"))]
    rest.insert(installed[0] if installed else len(rest), ROOT)
    sys.path[:] = [here, *rest]


def working_directory() -> str:
    """Return the working directory; CommandError if it was removed."""
    try:
        return os.getcwd()
    except OSError as error:
        from steadyrl.core.errors import CommandError

        reason = f"cannot be found ({error.strerror}): cd to one that exists"
        raise CommandError(f"the working directory {reason}") from None
