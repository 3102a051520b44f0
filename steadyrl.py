"""The installed command: `steadyrl train …`, or another program by its name."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from training.signals import ended_by_signals

# Each is scripts/<name>.py as well; everything else is for training.
PROGRAMS = ("evaluate", "plot", "compare", "checkpoint", "tune", "population")


def command() -> None:
    """Run the program that is named first, or train."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in PROGRAMS:
        from train import command as train

        train()
        return
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]  # as help shows it
    with ended_by_signals():
        _load(name).main()


def _load(name: str) -> Any:
    """Import a program from its place: a package of the user's may be called `scripts` as well."""
    spec = spec_from_file_location(f"steadyrl_{name}", Path(__file__).parent / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    command()
