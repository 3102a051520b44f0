"""Which card a run takes where several start side by side: the one that fewest of them have.

A sweep, study or population tells its runs how many there are at once; each then takes a lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steadyrl.core.private_directories import make_private, temporary_folder

AT_ONCE = "STEADYRL_RUNS_AT_ONCE"  # environment variable: runs side by side on this machine
VISIBLE = "CUDA_VISIBLE_DEVICES"


def runs_at_once() -> int:
    """Return how many runs the program that started this one has side by side; 1: none did."""
    given = os.environ.get(AT_ONCE, "")
    return max(1, int(given)) if given.isdecimal() else 1


def runs_per_card(cards: int) -> int:
    """Return how many runs share a card, of this many."""
    return -(-runs_at_once() // max(1, cards))


@contextmanager
def taken_card(cards: int) -> Iterator[int]:
    """Yield the index of the card that fewest runs of this user have taken; keep it taken."""
    folder = temporary_folder() / "cards"
    if cards < 2 or not (make_private(folder.parent) and make_private(folder)):
        yield 0
        return
    card, lock = _take(folder, _names(cards))
    try:
        yield card
    finally:
        if lock is not None:
            os.close(lock)


def _names(cards: int) -> list[str]:
    """Return names that are the same in every process, whatever cards it sees."""
    visible = [name.strip() for name in os.environ.get(VISIBLE, "").split(",")]
    usable = len(visible) == cards and all(name.replace("-", "").isalnum() for name in visible)
    return visible if usable else [str(index) for index in range(cards)]


def _take(folder: Path, names: list[str]) -> tuple[int, int | None]:
    """Return the first card with a free lock, and the lock; the system frees it with the process.

    All first locks come before all second ones, so that runs spread over the cards.
    """
    for place in range(runs_at_once()):
        for card, name in enumerate(names):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            file = os.open(folder / f"{name}-{place}.lock", flags, 0o600)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another run has it
                os.close(file)
            else:
                return card, file
    return os.getpid() % len(names), None
