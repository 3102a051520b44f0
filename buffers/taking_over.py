"""Rows that another replay held, taken into one of another size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffers.replay import ReplayBuffer
from buffers.timeline import ENDED, TERMINATED, VALID


class HeldRow(NamedTuple):
    """A row as a replay holds it: what was seen, and what came of it."""

    frame: NDArray  # [N, *frame_shape]
    action: NDArray  # [N]
    reward: NDArray  # [N]
    flags: NDArray[np.uint8]  # [N]


def take_over(replay: ReplayBuffer, rows: Iterable[HeldRow]) -> None:
    """Add rows that follow each other, as if they were collected now, to a stretch of their own.

    Their priorities are those of new rows. Of the last one only the observation is kept.
    """
    before: HeldRow | None = None
    for row in rows:
        obs = replay.stacked(row.frame)
        if before is None:
            replay.start(obs)
        else:
            ended, terminated, valid = (
                before.flags & bit != 0 for bit in (ENDED, TERMINATED, VALID)
            )
            truncated = ended & ~terminated
            replay.add(before.action, before.reward, terminated, truncated, valid, obs)
        before = row
