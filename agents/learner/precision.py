"""In which numbers networks are computed when they are learned from; all else is float32.

With bf16 the layers of a forward pass take products of 8 significant bits (autocast), and so do
their gradients; weights, optimiser, losses and what acts stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "bf16"]
Forward = Callable[..., Any]


def read_in(precision: Precision, forward: Forward, device: torch.device) -> Forward:
    """Return a network's forward pass in this precision; TF32 is a switch of the device."""
    if precision != "bf16":
        return forward

    def halved(*inputs: Tensor) -> Any:
        # No cache of weights: it would outlive a graph that is recorded.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            outputs = forward(*inputs)
        if isinstance(outputs, Tensor):
            return outputs.float()
        return tuple(output.float() for output in outputs)

    return halved


def learned_in(
    precision: Precision, loss: Callable[..., Any], networks: int, device: torch.device
) -> Callable[..., Any]:
    """Return a loss whose first arguments, so many `networks`, are read in this precision."""
    if precision != "bf16":
        return loss

    def of(*arguments: Any) -> Any:
        read = (read_in(precision, network, device) for network in arguments[:networks])
        return loss(*read, *arguments[networks:])

    return of
