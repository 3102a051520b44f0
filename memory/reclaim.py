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
    # glibc keeps what lies below a block in use, and up to 64 MB besides; others have no such call.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
