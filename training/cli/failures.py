"""Turn every exception into a one-line error: expected ones, out of memory, and bugs."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from steadyrl.core.command.packages import missing_package
from steadyrl.core.errors import (
    CommandError,
    ExpectedError,
    MemoryBudgetError,
    SettingError,
    describe,
    describe_allocation,
    interrupt_kept,
    is_out_of_memory,
    printable,
    startup_memory_error,
)
from steadyrl.core.files import read_tail
from steadyrl.training.config.settings import Job

if TYPE_CHECKING:
    import torch

LONGEST_STORY = 1_000_000  # bytes of a log searched for a traceback
UNREPEATABLE = "does not have a deterministic implementation"  # part of torch's error message


class BugError(ExpectedError):
    """A bug in the program: the only failure with exit code 1."""

    exit_code = 1


@contextmanager
def one_line_errors(job: Job | None = None) -> Iterator[None]:
    """Convert every exception into an ExpectedError, which is printed as one line."""
    try:
        with interrupt_kept() if job is None else nullcontext():  # a run reports its own end
            yield
    except ExpectedError:
        raise
    except Exception as error:
        raise as_expected_error(error, job) from error


def as_expected_error(error: Exception, job: Job | None) -> ExpectedError:
    """Return the ExpectedError for an unexpected exception: a missing package, memory, or a bug."""
    full = out_of_memory(error)
    if full is not None:
        return full
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return CommandError(f"{describe(error)}: raise the limit of open files (ulimit -n)")
    absent = missing_package(error)
    if absent is not None:
        return CommandError(absent)
    if isinstance(error, RuntimeError) and UNREPEATABLE in str(error):
        reason = f"not possible with this model and device ({describe(error)}): leave it out"
        return SettingError("deterministic", "true", reason)
    log = job.directory / "train.log" if job is not None else None
    if log is not None and has_traceback(log, error):
        return BugError(f"a bug of ours, please report it with {log}: {describe(error)}")
    with suppress(OSError):  # stderr is closed
        print(printable("".join(traceback.format_exception(error))), file=sys.stderr)
    return BugError(f"a bug of ours, please report it with the lines above: {describe(error)}")


def out_of_memory(error: BaseException) -> MemoryBudgetError | None:
    """Return the MemoryBudgetError of an out-of-memory exception; None for any other."""
    if not is_out_of_memory(error):
        return None
    unloaded = isinstance(error, ImportError | OSError)
    if unloaded and getattr(error, "errno", None) != errno.ENOMEM:
        return startup_memory_error(error)
    try:
        from steadyrl.memory.budget import memory_plan
    except (ImportError, MemoryError, OSError):  # not enough memory to import torch
        return startup_memory_error(error)

    plan = memory_plan({}, _device_at_work())
    return MemoryBudgetError(
        f"out of memory ({describe_allocation(error)}); {plan}. Use a smaller replay, "
        "rollout, batch or network, or fewer environments"
    )


def _device_at_work() -> torch.device | None:
    torch = sys.modules.get("torch")
    working = torch is not None and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if torch and working else None


def has_traceback(log: Path, error: Exception) -> bool:
    """Return whether a log has the traceback of `error`; a full disk may have truncated it."""
    try:
        _, begin, story = read_tail(log, LONGEST_STORY).rpartition("Traceback (most recent")
    except OSError:
        return False
    return bool(begin) and type(error).__name__ in story
