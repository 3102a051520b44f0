"""A Python that is too old, or lacks a required package: one line with what to type."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from steadyrl.core.command.typed import PACKAGE, ROOT, is_clone

OLDEST_PYTHON = (3, 11)
# Names under which the packages that SteadyRL requires, and theirs, are imported.
REQUIRED = (
    *("torch", "gymnasium", "numpy", "numba", "hydra", "omegaconf", "tensorboard", "safetensors"),
    *("psutil", "rich", "typing_extensions", "yaml", "packaging"),
)
EXIT_CODE = 2  # as for a command that cannot be carried out


@contextmanager
def required_packages() -> Iterator[None]:
    """End with one line if Python is too old, or a required package is not installed."""
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        _end(f"SteadyRL needs Python {needed} or later, this is {python} ({sys.executable})")
    try:
        yield
    except ModuleNotFoundError as error:
        line = missing_package(error)
        if line is None:
            raise
        _end(line)


def missing_package(error: BaseException) -> str | None:
    """Return what to type if an import failed for want of a required package; None: it did not."""
    name = getattr(error, "name", None)
    name = (name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name not in REQUIRED:
        return None
    source = f"-e {shlex.quote(str(ROOT))}" if is_clone() else PACKAGE
    python = shlex.quote(sys.executable)
    return (
        f"{name} is not installed for {sys.executable}: activate the environment that has it, or "
        f"run: {python} -m pip install {source}"
    )


def _end(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(EXIT_CODE)
