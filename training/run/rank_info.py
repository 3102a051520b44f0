"""Whether this process is one of several, as torchrun says it in the environment.

Nothing slow is imported, because refusals come first.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from typing import NamedTuple

from steadyrl.core.errors import SettingError

NEEDED = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class RankInfo(NamedTuple):
    """Which of how many ranks this process is, and which of those on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Return where this process stands; alone where nobody launched several."""
    size = environment.get("WORLD_SIZE", "1")
    if size == "1":
        return RankInfo()
    values = {name: environment.get(name, "") for name in NEEDED}
    numbers = [size, *(values[name] for name in NEEDED[:3])]
    if not all(number.isdigit() for number in numbers) or not all(values.values()):
        missing = ", ".join(name for name in NEEDED if not values[name]) or "a number"
        raise SettingError("WORLD_SIZE", size, f"{missing} is not set: start ranks with torchrun")
    world, rank, local, beside = map(int, numbers)
    return RankInfo(rank, world, local, beside)


def end_with_launcher() -> None:
    """Ask the kernel for SIGTERM when the launcher dies, so that no rank outlives it."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # it died before it was asked
        os.kill(os.getpid(), signal.SIGTERM)
