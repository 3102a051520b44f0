"""Commands as the reader types them: `python train.py` in a clone, `steadyrl train` installed."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

PACKAGE = "steadyrl"
MODULE = f"python -m {PACKAGE}"
# The root of a clone. In an installation it is the package, which has no `scripts/`.
ROOT = Path(__file__).resolve().parents[2]
# How texts in the code name a program, and the gap before a remark beside it.
IN_TEXTS = re.compile(r"python (?:train|scripts/(\w+))\.py([^\n]*?)( {2,}|(?=\n|$))")
LEAST_GAP = 2


def command_of(program: str = "train") -> str:
    """Return the command that starts a program, in the form that this process was started with."""
    started = sys.argv[0] if sys.argv else ""
    path = Path(started)
    if path.name == "__main__.py" or started.startswith(MODULE):
        if path.parent.name == PACKAGE or started.startswith(MODULE):
            return f"{MODULE} {program}"
    elif re.match(rf"{PACKAGE}( |$)", path.name) and not path.is_dir():
        return f"{PACKAGE} {program}"
    folder = path.parent.parent if path.parent.name == "scripts" else path.parent
    if path.suffix == ".py" and is_clone() and folder.resolve() == ROOT:
        return _in_clone(program, folder)
    # Started by another program: a notebook, a worker, a test.
    installed = installed_version(PACKAGE) is not None or not is_clone()
    return f"{PACKAGE} {program}" if installed else _in_clone(program, Path())


def as_typed(text: str) -> str:
    """Return a text with its `python train.py` and `python scripts/….py` as the reader types them.

    Remarks beside the commands stay in their column if they fit.
    """

    def replace(found: re.Match[str]) -> str:
        now = command_of(found[1] or "train") + found[2]
        gap = len(found[0]) - len(now)
        return now + " " * (max(LEAST_GAP, gap) if found[3] else 0)

    return IN_TEXTS.sub(replace, text)


def install_command(extra: str) -> str:
    """Return the command that installs one of the extras."""
    return f'pip install -e ".[{extra}]"' if is_clone() else f'pip install "{PACKAGE}[{extra}]"'


def is_clone() -> bool:
    """Return whether this code is a clone of the repository, perhaps installed with pip -e."""
    return (ROOT / "train.py").is_file() and (ROOT / "scripts").is_dir()


def _in_clone(program: str, folder: Path) -> str:
    script = folder / ("train.py" if program == "train" else f"scripts/{program}.py")
    return f"python {shlex.quote(os.fspath(script))}"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None: it is not, or is run from a checkout."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and rarely needed

    try:
        return version(package)
    except PackageNotFoundError:
        return None
