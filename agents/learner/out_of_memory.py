"""A device without memory for a learning step: clean and repeat it, or say what would fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from steadyrl.core.errors import MemoryBudgetError, describe_allocation
from steadyrl.memory.budget import tightest_bound
from steadyrl.memory.cache_cleaner import reclaim
from steadyrl.memory.process import readable

log = logging.getLogger("steadyrl")


def clean_up(device: torch.device, error: BaseException) -> None:
    """Free what garbage and caches hold on a device, before the step is repeated."""
    reason = describe_allocation(error)
    log.warning(
        "no memory is left on %s for an update (%s): cleaning, and trying once more", device, reason
    )
    reclaim(device)


def does_not_fit(
    device: torch.device, batch: Any, parts: int, gradient: Callable[[Any], object]
) -> MemoryBudgetError:
    """Return the error of a batch whose gradient does not fit, found by trying smaller ones."""
    reclaim(device)
    free, samples = tightest_bound(device).free, len(batch[0])
    fits = _largest_that_fits(device, batch, gradient)
    message = (
        f"an update of {samples:,} samples does not fit on {device} ({readable(free)} are free "
        "before it)"
    )
    if not fits:
        return MemoryBudgetError(
            f"{message}, nor does one sample: make the network smaller, or the replay if it is "
            "there too"
        )
    parts *= -(-samples // fits)
    return MemoryBudgetError(
        f"{message}; {fits:,} do: agent.grad_accumulation={parts} takes the same steps in {parts} "
        "parts"
    )


def _largest_that_fits(device: torch.device, batch: Any, gradient: Callable[[Any], object]) -> int:
    """Return the samples of the largest half, quarter, … of a batch whose gradient fits; 0: none.

    Sequences stay whole: of S·L samples, a field of S entries has one for each sequence.
    """
    whole = min(map(len, batch))
    part = whole // 2
    while part:
        samples = part * len(batch[0]) // whole
        try:
            gradient(type(batch)(*(field[: part * len(field) // whole] for field in batch)))
        except torch.OutOfMemoryError:
            pass
        else:
            return samples
        reclaim(device)  # after the error is gone, and what its frames held
        part //= 2
    return 0
