"""The installed command: `steadyrl train …`, or another program by its name."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from steadyrl.core.command.interrupt import end_on_interrupt
from steadyrl.core.command.streams import open_standard_streams
from steadyrl.training.cli.start import started


def command() -> None:
    """Run the program that is named first, or train; without arguments, say what there is."""
    open_standard_streams()
    end_on_interrupt()  # before anything slow is imported
    from steadyrl.core.command.typed import command_of
    from steadyrl.training.cli.programs import PROGRAMS, short_help

    if not sys.argv[1:]:
        from steadyrl.core.errors import exit_on_error
        from steadyrl.training.logging.terminal import safe_stdout

        with exit_on_error(), safe_stdout():
            print(short_help())
        return
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in PROGRAMS:
        sys.argv[:2] = [command_of(name)]  # as help shows it
        run(name)
        return
    if name.isalpha() and name != "train":
        from steadyrl.core.errors import nearest

        hint = nearest(name, ("train", *PROGRAMS))
        print(f"error: {name}: no such program; {hint}", file=sys.stderr)
        sys.exit(2)
    from steadyrl.loop import command as train

    train()


def run(name: str) -> None:
    """Run one of the programs; a signal ends it."""
    with started():
        from steadyrl.training.cli.programs import PROGRAMS

        program: Any = import_module(f"steadyrl.training.cli.{PROGRAMS[name].module}")
        program.main()
