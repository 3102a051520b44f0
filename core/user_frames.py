"""Find the frames of user code in a traceback: neither SteadyRL's nor installed libraries'."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

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
# A frame as `faulthandler` writes it, and what it writes for a character that is not ASCII.
DUMPED = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.M)
ESCAPED = re.compile(r"\\(?:x(?=..)|u(?=....)|U(?=.{8}))([0-9a-f]{2,8})")


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error in user code, outermost first."""
    return _without_installed(_foreign_frames(error))


def _without_installed(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [frame for frame in frames if is_user_code(frame.filename)]


def _foreign_frames(error: BaseException) -> list[traceback.FrameSummary]:
    summary = traceback.StackSummary.extract(
        traceback.walk_tb(error.__traceback__), lookup_lines=False
    )
    return [frame for frame in summary if is_foreign(frame.filename)]


def place_of(error: BaseException) -> str:
    """Return `file.py:41`, the innermost frame of user code in an error's traceback.

    Without user code, the innermost frame of another installed package; "" if there is none.
    """
    return _innermost_place(_foreign_frames(error))


def _innermost_place(foreign: list[traceback.FrameSummary]) -> str:
    frames = _without_installed(foreign) or foreign
    return _place(frames[-1]) if frames else ""


def place_of_stack(frame: FrameType | None) -> str:
    """Return `place_of` for the calls that are running in this thread, `frame` the innermost."""
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return _innermost_place([each for each in reversed(frames) if is_user_code(each.filename)])


def place_and_frames(dump: str) -> tuple[str, tuple[str, ...]]:
    """Return `place_of` and `shown_frames` of a stack that `faulthandler` has written."""
    found = [
        traceback.FrameSummary(_unescaped(file), int(line), name, lookup_line=False)
        for file, line, name in reversed(DUMPED.findall(dump))
    ]
    foreign = [frame for frame in found if is_foreign(frame.filename)]
    return _innermost_place(foreign), _shown(_without_installed(foreign))


def _unescaped(file: str) -> str:
    return ESCAPED.sub(lambda found: chr(int(found[1], 16)), file)


def shown_frames(
    error: BaseException, *, except_of: type[BaseException] | tuple[()] = ()
) -> tuple[str, ...]:
    """Return the innermost frames of user code, one line each, of the first cause that has any.

    Errors of the types `except_of` are SteadyRL's own: only their causes are searched.
    """
    for each in _causes(error):
        # From a worker process, or where user code defines what returned a wrong result.
        frames_elsewhere = getattr(each, "user_frames", ())
        if frames_elsewhere:
            return tuple(frames_elsewhere)
        if isinstance(each, except_of):
            continue
        frames = user_frames(each)
        if frames:
            return _shown(frames)
    return ()


def defining_frame(function: object) -> tuple[str, ...]:
    """Return the line where user code defines a function, as a frame is shown; () elsewhere."""
    code = getattr(function, "__code__", None)
    if code is None or not is_user_code(code.co_filename):
        return ()
    return _shown([traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)])


def _shown(frames: list[traceback.FrameSummary]) -> tuple[str, ...]:
    return tuple(
        f"{_place(frame)} in {frame.name}: {(frame.line or '')[:LONGEST_CODE]}"
        for frame in frames[-MAX_FRAMES:]
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_user_code(file: str) -> bool:
    """Return whether a file is user code: neither SteadyRL's, Python's, nor an installed one."""
    return is_foreign(file) and not any(mark in file for mark in INSTALLED)


def is_foreign(file: str) -> bool:
    """Return whether a file is neither SteadyRL's, Python's, nor one of LIBRARIES'."""
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
