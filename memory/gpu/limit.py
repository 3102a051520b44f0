"""How much of a card's memory a run may take."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from steadyrl.core.errors import MemoryBudgetError, SettingError, describe_allocation
from steadyrl.memory.gpu.cards import runs_per_card
from steadyrl.memory.gpu.peak import card_of
from steadyrl.memory.process import MB

log = logging.getLogger("steadyrl")

CONTEXT_BYTES = 600 * MB  # what the driver takes for a process, besides torch's allocator


@contextmanager
def limited(device: torch.device, limit_mb: float | None) -> Iterator[None]:
    """Let torch's allocator reserve `limit_mb` of a card in this block.

    Beyond it, the allocator says that memory is exhausted, as if the card were smaller. None: its
    part, if several runs were started on the card, else all.
    """
    sharing = runs_per_card(torch.cuda.device_count()) if device.type == "cuda" else 1
    if device.type != "cuda" or (limit_mb is None and sharing == 1):
        yield
        return
    card = card_of(device)
    total = torch.cuda.get_device_properties(card).total_memory
    if limit_mb is None:
        limit_mb = memory_per_run(total, sharing) // MB
        log.info("%s is shared by %d runs: memory.cuda_limit_mb=%d", device, sharing, limit_mb)
    if limit_mb * MB > total:
        reason = f"{torch.cuda.get_device_name(card)} has {total / MB:,.0f} MB"
        raise SettingError("memory.cuda_limit_mb", f"{limit_mb:g}", reason)
    before = limit_of_card(device, total) / total
    torch.cuda.set_per_process_memory_fraction(limit_mb * MB / total, card)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryBudgetError(
            f"memory.cuda_limit_mb={limit_mb:g} is used up ({describe_allocation(error)}): raise "
            "it, or use a smaller replay, rollout, batch or network"
        ) from error
    finally:
        torch.cuda.set_per_process_memory_fraction(before, card)


def memory_per_run(total: int, runs: int) -> int:
    """Return the bytes of tensors that each of several runs may have on a card of `total` bytes."""
    each = total // runs
    return max(each // 2, each - CONTEXT_BYTES)


def limit_of_card(device: torch.device, total: int) -> int:
    """Return the bytes of a card that torch's allocator may reserve, of `total`."""
    # Not in torch 2.9, where only the allocator knows it.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return total if fraction is None else int(fraction(card_of(device)) * total)
