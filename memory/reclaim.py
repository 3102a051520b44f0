"""Hand memory that nobody uses back to the system and to the driver."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch


def reclaim(device: torch.device) -> None:
    """Collect garbage first: it may be what keeps the allocators' blocks."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    trim()


def trim() -> None:
    """Hand freed memory back that the allocator of C keeps: milliseconds, more with a torn heap.

    glibc keeps what lies below a block in use, and up to 64 MB besides; others have no such call.
    """
    hand_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if hand_back is not None:
        hand_back(0)
