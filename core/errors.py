"""Expected errors, shown as one line with an exit code; formatting and validation helpers."""

from __future__ import annotations

import errno
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from numbers import Integral
from os import PathLike
from typing import Any, NoReturn, Self

from steadyrl.core.user_frames import place_of, shown_frames

WIDEST_LAYER = 1_000_000
# Messages of the dynamic loader when out of memory; Python turns them into ImportError.
UNLOADABLE = ("failed to map segment", "cannot map zero-fill pages", "Cannot allocate memory")
# Messages of torch's allocators.
UNALLOCATED = ("DefaultCPUAllocator", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
# A command at the end of a message.
COMMAND = re.compile(r" ((?:python|steadyrl|pip install|tensorboard) .*)$")
LONGEST_LINE = 500  # characters shown of a third-party message
SHORT_LINE = 250  # the same, if more text follows
LONGEST_SHOWN = 60  # characters of a value in an error message


class ExpectedError(Exception):
    """An error shown as one line; its traceback goes to the log only."""

    exit_code = 1
    silent = False  # not printed: another process of the same run prints it
    together = False  # raised on all ranks at the same step
    details: tuple[str, ...] = ()  # lines below the error line, such as commands to copy
    user_frames: tuple[str, ...] = ()  # lines of user code that it is about, where none raised it

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.details])

    @property
    def line(self) -> str:
        """The error line, without what is below it."""
        return one_line(super().__str__())

    def append(self, text: str) -> None:
        """Add to the end of the error line."""
        self.args = (f"{self.args[0]}{text}",)

    def with_details(self, *lines: str) -> Self:
        """Return this error with lines below its error line."""
        self.details = lines
        return self


class CommandError(ExpectedError):
    """Refuse a command that cannot be read, or does not compose to a configuration."""

    exit_code = 2


def show(value: Any, *, whole: bool = False) -> Any:
    """Return a value as written on the command line; long ones in short unless `whole`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ",".join(str(show(item, whole=whole)) for item in value) + "]"
    if isinstance(value, float):
        short = f"{value:g}"
        return repr(value) if whole and float(short) != value else short
    if isinstance(value, Mapping):
        parts = (f"{key}:{show(item, whole=whole)}" for key, item in value.items())
        return "{" + ",".join(parts) + "}"
    text = str(value)
    return value if whole or len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"


class SettingError(ExpectedError):
    """An invalid setting: its name, its value, and what is wrong."""

    exit_code = 2

    def __init__(self, field: str, value: object, reason: str) -> None:
        shown = value if isinstance(value, float) else show(value, whole=True)
        super().__init__(f"{field}={shown}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason

    def below(self, block: str) -> SettingError:
        """Return the same error with the key's full name, below `block`."""
        return SettingError(f"{block}.{self.field}", self.value, self.reason)


class NonFiniteError(ExpectedError):
    """NaN or infinity in rewards, observations or losses."""

    exit_code = 5


class MemoryBudgetError(ExpectedError):
    """An allocation, or a run, does not fit into the available memory."""

    exit_code = 7
    overrides: tuple[str, ...] = ()  # with which the run can be resumed: a higher limit


@contextmanager
def interrupt_kept() -> Iterator[None]:
    """Raise an interrupt again that an error in the block has replaced.

    Code that cleans up may fail: argparse's does, between two of its steps.
    """
    outside = sys.exception()  # handled by a caller, perhaps an interrupt as well
    try:
        yield
    except Exception as error:
        before = error.__context__
        while before is not None and before is not outside:
            if isinstance(before, KeyboardInterrupt):
                raise before from None
            before = before.__context__
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, the system, the dynamic loader or torch ran out of memory."""
    known = isinstance(error, MemoryError | ImportError | OSError)
    return (known and _out_of_memory_cause(error) is not None) or _is_torchs(error)


def _is_torchs(error: BaseException) -> bool:
    # If torch is not imported, the error is not torch's; importing it would take seconds.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # Errors of the host allocator and of CUDA libraries are plain RuntimeErrors.
    return isinstance(error, RuntimeError) and any(words in str(error) for words in UNALLOCATED)


def _out_of_memory_cause(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error in an error's chain of causes; None: there is none."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return error
    if isinstance(error, ImportError | OSError) and any(
        words in str(error) for words in UNLOADABLE
    ):
        return error
    before = error.__cause__ or error.__context__
    return None if before is None else _out_of_memory_cause(before)


def startup_memory_error(error: BaseException) -> MemoryBudgetError:
    """Return the error for running out of memory while the program is loading."""
    cause = describe(_out_of_memory_cause(error) or error)
    return MemoryBudgetError(
        f"memory ran out while the program was loaded ({cause}): "
        "raise its memory limit (ulimit -v, or the memory of its job)"
    )


def exit_with(error: ExpectedError) -> NoReturn:
    """Print the error's line and the frames of user code it came from; exit with its code."""
    if not error.silent:
        with suppress(OSError):  # stderr is full or closed: the exit code remains
            first, *below = error_lines(error)
            if sys.stderr.isatty():
                first = "\n".join(at_words(first, shutil.get_terminal_size().columns))
            print("\n".join([first, *below]), file=sys.stderr)
    sys.exit(error.exit_code)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the process with the line and the exit code of an expected error."""
    try:
        yield
    except ExpectedError as error:
        exit_with(error)


def at_words(line: str, columns: int) -> list[str]:
    """Return a line in lines that break between words; a command at its end is a line of its own.

    Paths and commands stay in one piece, to be copied: the terminal wraps them.
    """
    if len(line) <= columns:
        return [line]
    found = COMMAND.search(line)
    text = line[: found.start()] if found else line
    lines = textwrap.wrap(
        text, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [*lines, f"  {found[1]}"] if found else lines


def error_lines(error: ExpectedError) -> list[str]:
    """Return the error line, its details, and one line per frame of user code."""
    frames = shown_frames(error, except_of=ExpectedError)
    details = [" ".join(printable(line).splitlines()) for line in error.details]
    below = [*details, *map(one_line, frames)]
    return [f"error: {error.line}", *(f"  {line}" for line in below)]


def describe(error: BaseException) -> str:
    """Return 'Type: message' as one printable line, even if `str(error)` fails."""
    try:
        message = str(error)
    except Exception:  # __str__ of a third-party error may fail
        return f"{type(error).__name__}: its message cannot be read"
    return f"{type(error).__name__}: {one_line(message) or 'no message'}"


def describe_allocation(error: BaseException) -> str:
    """Return `describe` of an out-of-memory error without the advice that torch appends to it."""
    return ". ".join(describe(error).split(". ")[:2])


def printable(text: str) -> str:
    """Replace unprintable characters: third-party text must not control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def with_place(error: BaseException) -> str:
    """Return 'Type: message (my_env.py:41)' with the location in user code."""
    return at_place(describe(error), error)


def at_place(message: str, error: BaseException) -> str:
    """Append the location in user code that an error came from to its message."""
    place = one_line(place_of(error))
    if not place:
        return message
    # Shortened here, because callers cut lines at the end, where the location is.
    return f"{message if len(message) <= SHORT_LINE else message[: SHORT_LINE - 1] + '…'} ({place})"


def one_line(text: str) -> str:
    """Return third-party text as one printable line of limited length."""
    line = " ".join(printable(text).split())
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return 'did you mean X?' for the most similar choice, or the list of all choices."""
    known = list(choices)
    return did_you_mean(name, known, cutoff=0.5) or f"there are: {', '.join(known)}"


def did_you_mean(name: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return 'did you mean X?' for a choice that is similar enough, else ""."""
    close = get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else ""


def validate_positive(settings: object, *names: str) -> None:
    """Raise SettingError for fields that are not above 0."""
    for name in names:
        value = getattr(settings, name)
        if not value > 0:
            raise SettingError(name, value, "must be above 0")


def validate_at_least(settings: object, least: int, *names: str, meaning: str = "") -> None:
    """Raise SettingError for fields below `least`, which may have a meaning of its own."""
    for name in names:
        value = getattr(settings, name)
        if not value >= least:
            raise SettingError(name, value, f"must be {least}{meaning} or more")


def validate_non_negative(settings: object, *names: str) -> None:
    """Raise SettingError for fields below 0."""
    validate_at_least(settings, 0, *names)


def validate_interval(settings: object, *names: str) -> None:
    """Raise SettingError for fields below 0, which means never."""
    validate_at_least(settings, 0, *names, meaning=" (never)")


def validate_at_most(settings: object, limit: float, *names: str) -> None:
    """Raise SettingError for fields above `limit` (None fields pass)."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value > limit:
            raise SettingError(name, value, f"must be at most {limit:,g}")


def validate_fraction(settings: object, *names: str) -> None:
    """Raise SettingError for fields outside [0, 1]."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1:
            raise SettingError(name, value, "must be between 0 and 1")


def validate_whole(name: str, value: object, least: int) -> None:
    """Raise SettingError for an argument that is no integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise SettingError(name, repr(value), "must be a whole number")
    if value < least:
        raise SettingError(name, value, f"must be {least} or more")


def validate_bool(name: str, value: object) -> None:
    """Raise SettingError for an argument that is not True or False, Python's or NumPy's."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise SettingError(name, repr(value), "must be True or False")


def validate_path(name: str, value: object) -> None:
    """Raise SettingError for an argument that names no path, such as what `train` returned."""
    if isinstance(value, str | PathLike):
        return
    instead = ": write its .directory" if hasattr(value, "directory") else ""
    raise SettingError(name, type(value).__name__, f"is no path{instead}")


def validate_hidden(sizes: tuple[int, ...]) -> None:
    """Raise SettingError for no hidden layers or invalid sizes."""
    if not sizes:
        raise SettingError("hidden", list(sizes), "needs at least one layer, such as [64,64]")
    if min(sizes) <= 0:
        raise SettingError("hidden", list(sizes), "layer sizes must be above 0")
    if max(sizes) > WIDEST_LAYER:
        raise SettingError("hidden", list(sizes), f"layer sizes must be at most {WIDEST_LAYER:,}")
