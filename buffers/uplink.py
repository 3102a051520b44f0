"""Small arrays on their way from the host to a device."""

from __future__ import annotations

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray, device: torch.device) -> Tensor:
    """Return the array on the device without waiting for it.

    Pinned memory comes from torch's cache, which keeps a block back until its copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
