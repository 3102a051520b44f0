"""End all processes that an environment's process has started, daemons included.

A daemon forks twice and opens a session of its own: nothing leads to it from the process that
started it. But resource limits are inherited, whatever a process does. One of them, RLIMIT_LOCKS,
is kept by Linux and obeyed by nothing since 2.4.25: it can carry a mark.

To adopt orphans instead (PR_SET_CHILD_SUBREAPER) would fill the trainer with zombies that it cannot
tell from children that somebody still waits for.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import sys
import uuid
from collections.abc import Collection, Iterator
from contextlib import closing, suppress

RLIMIT_LOCKS = 10  # on every processor; Python has no name for it
MARKED = 1 << 61  # a bit of every mark, and of no limit that somebody has set
FAMILY = 31  # lower bits of a mark; the upper bits are those of the topmost marked ancestor
ROUNDS = 10  # a process may have started another one before it was killed
END_SECONDS = 1.0  # for the kernel to end what was killed
_LOCKS = re.compile(rb"^Max file locks +(\d+) ", re.MULTILINE)


def new_mark(*, family: bool = True) -> int:
    """Return a mark that no other process has.

    `family`: in a marked process, a mark of its family; else one of a new family.
    """
    drawn = MARKED | uuid.uuid4().int >> 67  # a limit has less than 64 bits
    inherited = resource.getrlimit(RLIMIT_LOCKS)[0] if sys.platform == "linux" else -1
    if not family or not MARKED <= inherited < 2 * MARKED:
        return drawn
    return inherited >> FAMILY << FAMILY | drawn & (1 << FAMILY) - 1


def set_mark(mark: int) -> None:
    """Mark this process and all that it will start; do nothing where that cannot be."""
    if sys.platform == "linux":
        with suppress(ValueError, OSError):  # somebody has set a lower limit
            resource.setrlimit(RLIMIT_LOCKS, (mark, resource.getrlimit(RLIMIT_LOCKS)[1]))


def end_marked(marks: Collection[int], *, families: bool = False) -> None:
    """Kill all processes that bear one of these marks, and wait until they are gone.

    `families`: also processes that a marked process has marked.
    """
    shift = FAMILY if families else 0
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return
    for _ in range(ROUNDS):
        found = list(_living({mark >> shift for mark in marks}, shift))
        for handle in found:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for handle in found:
            is_over(handle, END_SECONDS)
            os.close(handle)
        if not found:
            return


def _living(marks: Collection[int], shift: int) -> Iterator[int]:
    """Yield a handle of each process that bears one of the marks and may be killed by this one.

    Marks are compared without their lowest `shift` bits.
    """
    with closing(os.scandir("/proc")) as entries:
        numbers = [int(each.name) for each in entries if each.name.isdigit()]
    for number in numbers:
        if _mark_of(number, shift) not in marks:
            continue
        try:
            handle = os.pidfd_open(number)
        except OSError:  # it has just ended
            continue
        # Read again: the number may be that of another process by now.
        ours = number != os.getpid() and _mark_of(number, shift) in marks
        try:
            signal.pidfd_send_signal(handle, 0)
        except OSError:  # it ended, or runs as another user
            ours = False
        if ours and not is_over(handle, 0.0):
            yield handle
        else:
            os.close(handle)


def _mark_of(number: int, shift: int) -> int | None:
    try:
        with open(f"/proc/{number}/limits", "rb") as file:
            found = _LOCKS.search(file.read())
    except OSError:
        return None
    return None if found is None else int(found[1]) >> shift


def is_over(handle: int, seconds: float) -> bool:
    """Return whether a process ends within so many seconds."""
    ready = select.poll()
    ready.register(handle, select.POLLIN)
    return bool(ready.poll(1000 * seconds))
