"""Where in a user's own code an error was raised: neither in ours nor in installed libraries."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

MAX_FRAMES = 5  # the last ones, of those that are shown
LONGEST_CODE = 120  # characters of a line
PACKAGE = Path(__file__).absolute().parents[1]
# What a checkout has beside the package is ours as well.
OURS = (
    f"{PACKAGE}{os.sep}",
    f"{PACKAGE.with_name('scripts')}{os.sep}",
    str(PACKAGE.with_name("train.py")),
)
# Where installed packages lie; the names are those of other virtual environments, too.
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Packages that run a user's code, or that it only calls: they are not where a mistake is.
LIBRARIES = ("gymnasium", "numpy", "torch", "numba", "hydra", "omegaconf", "envpool", "ale_py")


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error that lie in a user's own code, the outermost first."""
    return [f for f in _foreign_frames(error) if not any(mark in f.filename for mark in INSTALLED)]


def _foreign_frames(error: BaseException) -> list[traceback.FrameSummary]:
    summary = traceback.StackSummary.extract(
        traceback.walk_tb(error.__traceback__), lookup_lines=False
    )
    return [frame for frame in summary if _is_foreign(frame.filename)]


def place_of(error: BaseException) -> str:
    """Return `file.py:41`, where a user's code raised an error or called what did; "" if nowhere.

    Where none is the user's own, it is that of an installed package.
    """
    frames = user_frames(error) or _foreign_frames(error)
    return _place(frames[-1]) if frames else ""


def shown_frames(
    error: BaseException, *, except_of: type[BaseException] | tuple[()] = ()
) -> tuple[str, ...]:
    """Return the last frames of a user's code, a line each, of the first cause that has any.

    Errors `except_of` some type were raised by us; only what led to them is looked at.
    """
    for each in _causes(error):
        if isinstance(each, except_of):
            continue
        frames_elsewhere = getattr(each, "user_frames", ())  # of another process
        if frames_elsewhere:
            return tuple(frames_elsewhere)
        frames = user_frames(each)
        if frames:
            return tuple(
                f"{_place(frame)} in {frame.name}: {(frame.line or '')[:LONGEST_CODE]}"
                for frame in frames[-MAX_FRAMES:]
            )
    return ()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_foreign(file: str) -> bool:
    if not os.path.isabs(file):  # of an extension module, or of no file at all: `<string>`
        return False
    standard = sysconfig.get_path("stdlib") + os.sep
    installed = next((mark for mark in INSTALLED if mark in file), None)
    if installed is not None:
        package = file.rpartition(installed)[2].partition(os.sep)[0]
        return package not in LIBRARIES and not file.startswith(OURS)
    return not file.startswith((standard, *OURS))


def _place(frame: traceback.FrameSummary) -> str:
    """Return file and line, the file from the working directory on where it lies below it."""
    file = frame.filename
    here = os.path.join(_working_directory(), "")
    return f"{file.removeprefix(here)}:{frame.lineno}"


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.sep
