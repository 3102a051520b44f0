"""Expected failures: each is one clear line for the person at the keyboard and an exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from typing import NoReturn

from steadyrl.core.user_frames import place_of, shown_frames

WIDEST_LAYER = 1_000_000
# What the loader says of a library that there is no memory for; Python makes it an ImportError.
UNLOADABLE = ("failed to map segment", "cannot map zero-fill pages", "Cannot allocate memory")
LONGEST_LINE = 500  # characters of a foreign message that are shown
SHORT_LINE = 250  # of one after which more is said


class ExpectedError(Exception):
    """A failure that is explained in one line; its traceback goes to the log only."""

    exit_code = 1
    silent = False  # another process of the same run explains it
    together = False  # all processes of the run end by it, once they have agreed on it


class SettingError(ExpectedError):
    """Refuse a setting: which one, its value, and what is wrong with it."""

    exit_code = 2

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}={value}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class NonFiniteError(ExpectedError):
    """Stop a run whose rewards, observations or losses are no longer numbers."""

    exit_code = 5


class MemoryBudgetError(ExpectedError):
    """Refuse an allocation, or stop a run, that does not fit in the memory there is."""

    exit_code = 7


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, the system or the loader of libraries had no memory left."""
    return (
        isinstance(error, MemoryError | ImportError | OSError)
        and _out_of_memory_cause(error) is not None
    )


def _out_of_memory_cause(error: BaseException) -> BaseException | None:
    """Return what an error comes from if it is a want of memory: packages wrap it in their own."""
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
    """Print one line, and frames of a user's own code that it came from; exit with its code."""
    if not error.silent:
        with suppress(OSError):  # where it went to is full, or gone: the code still tells
            print("\n".join(error_lines(error)), file=sys.stderr)
    sys.exit(error.exit_code)


def error_lines(error: ExpectedError) -> list[str]:
    """Return the line that tells of a failure, and those of a user's own frames."""
    frames = shown_frames(error, except_of=ExpectedError)
    return [f"error: {one_line(str(error))}", *(f"  {one_line(frame)}" for frame in frames)]


def describe(error: BaseException) -> str:
    """Return 'Type: message' as one printable line, whatever the error's own text does."""
    try:
        message = str(error)
    except Exception:  # the text of a foreign error is foreign code
        return f"{type(error).__name__}: its message cannot be read"
    return f"{type(error).__name__}: {one_line(message) or 'no message'}"


def printable(text: str) -> str:
    """Return foreign text as lines that cannot move the cursor or clear the screen."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def with_place(error: BaseException) -> str:
    """Return the same with the place in a user's code that it came from: `… (my_env.py:41)`."""
    return at_place(describe(error), error)


def at_place(message: str, error: BaseException) -> str:
    """Return what is told of an error with the place in a user's code that it came from."""
    place = one_line(place_of(error))
    if not place:
        return message
    # Whoever shows the line shortens it at its end.
    return f"{message if len(message) <= SHORT_LINE else message[: SHORT_LINE - 1] + '…'} ({place})"


def one_line(text: str) -> str:
    """Return foreign text as one line that cannot move the cursor or clear the screen."""
    line = " ".join(printable(text).split())
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return 'did you mean X?' for the nearest choice, or the list of all of them."""
    known = list(choices)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"


def validate_positive(settings: object, *names: str) -> None:
    """Refuse fields that are not above 0."""
    for name in names:
        value = getattr(settings, name)
        if not value > 0:
            raise SettingError(name, value, "must be above 0")


def validate_non_negative(settings: object, *names: str) -> None:
    """Refuse fields that are below 0."""
    for name in names:
        value = getattr(settings, name)
        if not value >= 0:
            raise SettingError(name, value, "must be 0 or more")


def validate_at_most(settings: object, limit: float, *names: str) -> None:
    """Refuse fields beyond what arithmetic in float32, or patience, can do anything with."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value > limit:
            raise SettingError(name, value, f"must be at most {limit:,g}")


def validate_fraction(settings: object, *names: str) -> None:
    """Refuse fields outside [0, 1]."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1:
            raise SettingError(name, value, "must be between 0 and 1")


def validate_hidden(sizes: tuple[int, ...]) -> None:
    """Refuse an empty network or a layer without units."""
    if not sizes:
        raise SettingError("hidden", list(sizes), "needs at least one layer, such as [64,64]")
    if min(sizes) <= 0:
        raise SettingError("hidden", list(sizes), "layer sizes must be above 0")
    if max(sizes) > WIDEST_LAYER:
        raise SettingError("hidden", list(sizes), f"layer sizes must be at most {WIDEST_LAYER:,}")
