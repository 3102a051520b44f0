"""The installed command: `steadyrl train …`, or another program by its name."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from steadyrl.training.run.signals import ended_by_signals

# Each is training/cli/<name>.py; scripts/<name>.py starts it in a checkout. Everything else trains.
PROGRAMS = ("evaluate", "plot", "compare", "checkpoint", "tune", "population")
ROOT = str(Path(__file__).parents[1])  # of the checkout, or where packages are installed


def command() -> None:
    """Run the program that is named first, or train."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in PROGRAMS:
        from steadyrl.loop import command as train

        train()
        return
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]  # as help shows it
    run(name)


def run(name: str) -> None:
    """Run one of the programs; a signal ends it."""
    search_callers_directory_first()
    with ended_by_signals():
        program: Any = import_module(f"steadyrl.training.cli.{name}")
        program.main()


def search_callers_directory_first() -> None:
    """Find users' modules in the current directory, and before a checkout's folders of that name.

    A checkout has folders called `agents` and `envs` at its top. It stays on the path, for
    processes that are started anew, but behind all where no other `steadyrl` is installed.
    """
    rest = [path for path in sys.path if path not in (ROOT, "", os.getcwd())]
    installed = [i for i, path in enumerate(rest) if os.path.isdir(os.path.join(path, "steadyrl"))]
    rest.insert(installed[0] if installed else len(rest), ROOT)
    sys.path[:] = [os.getcwd(), *rest]
