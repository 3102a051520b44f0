"""Rank and world size of this process, from the environment variables that torchrun sets.

Nothing slow is imported: a wrong configuration is refused before torch is loaded.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from steadyrl.core.errors import SettingError

NEEDED = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankInfo(NamedTuple):
    """Rank and number of ranks, overall and on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_info() -> RankInfo:
    """Return this process's ranks; one of one if it was not launched by torchrun."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return RankInfo()
    values = {name: os.environ.get(name, "") for name in NEEDED}
    numbers = [size, *(values[name] for name in NEEDED[:3])]
    if not all(number.isdigit() for number in numbers) or not all(values.values()):
        missing = ", ".join(name for name in NEEDED if not values[name]) or "a number"
        raise SettingError("WORLD_SIZE", size, f"{missing} is not set: start ranks with torchrun")
    world, rank, local, beside = map(int, numbers)
    return RankInfo(rank, world, local, beside)
