"""Find the frames of user code in a traceback: neither SteadyRL's nor installed libraries'."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

MAX_FRAMES = 5  # innermost frames shown
LONGEST_CODE = 120  # characters of a line
PACKAGE = Path(__file__).absolute().parents[1]
# A checkout's files outside the package are SteadyRL's too.
OURS = (
    f"{PACKAGE}{os.sep}",
    f"{PACKAGE.with_name('scripts')}{os.sep}",
    str(PACKAGE.with_name("train.py")),
)
# Directories of installed packages, in any virtual environment.
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Packages that call user code or are called by it: their frames are not the cause.
LIBRARIES = ("gymnasium", "numpy", "torch", "numba", "hydra", "omegaconf", "envpool", "ale_py")


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error in user code, outermost first."""
    return [f for f in _foreign_frames(error) if not any(mark in f.filename for mark in INSTALLED)]


def _foreign_frames(error: BaseException) -> list[traceback.FrameSummary]:
    summary = traceback.StackSummary.extract(
        traceback.walk_tb(error.__traceback__), lookup_lines=False
    )
    return [frame for frame in summary if _is_foreign(frame.filename)]


def place_of(error: BaseException) -> str:
    """Return `file.py:41`, the innermost frame of user code in an error's traceback.

    Without user code, the innermost frame of another installed package; "" if there is none.
    """
    frames = user_frames(error) or _foreign_frames(error)
    return _place(frames[-1]) if frames else ""


def shown_frames(
    error: BaseException, *, except_of: type[BaseException] | tuple[()] = ()
) -> tuple[str, ...]:
    """Return the innermost frames of user code, one line each, of the first cause that has any.

    Errors of the types `except_of` are SteadyRL's own: only their causes are searched.
    """
    for each in _causes(error):
        if isinstance(each, except_of):
            continue
        frames_elsewhere = getattr(each, "user_frames", ())  # from a worker process
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
    """Yield an error and its causes, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_foreign(file: str) -> bool:
    if not os.path.isabs(file):  # an extension module, or no file: `<string>`
        return False
    standard = sysconfig.get_path("stdlib") + os.sep
    installed = next((mark for mark in INSTALLED if mark in file), None)
    if installed is not None:
        package = file.rpartition(installed)[2].partition(os.sep)[0]
        return package not in LIBRARIES and not file.startswith(OURS)
    return not file.startswith((standard, *OURS))


def _place(frame: traceback.FrameSummary) -> str:
    """Return file:line, relative to the working directory if inside it."""
    file = frame.filename
    here = os.path.join(_working_directory(), "")
    return f"{file.removeprefix(here)}:{frame.lineno}"


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.sep
