"""Precision of forward and backward passes in updates; everything else is float32.

With bf16, layers compute in bfloat16 (autocast), and so do their gradients; weights, optimiser
state, losses and actors stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "bf16"]
Forward = Callable[..., Any]


def forward_in_precision(precision: Precision, forward: Forward, device: torch.device) -> Forward:
    """Return a network's forward pass in this precision; TF32 is a global switch of the device."""
    if precision != "bf16":
        return forward

    def in_bf16(*inputs: Tensor) -> Any:
        # Autocast's weight cache would outlive the capture of a CUDA graph.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            outputs = forward(*inputs)
        if isinstance(outputs, Tensor):
            return outputs.float()
        parts = [output.float() for output in outputs]
        # Losses read the parts of a NamedTuple by name.
        return type(outputs)(*parts) if hasattr(outputs, "_fields") else tuple(parts)

    return in_bf16


def loss_in_precision(
    precision: Precision, loss: Callable[..., Any], networks: int, device: torch.device
) -> Callable[..., Any]:
    """Return a loss whose first `networks` arguments are computed in this precision."""
    if precision != "bf16":
        return loss

    def in_bf16(*arguments: Any) -> Any:
        forwards = (
            forward_in_precision(precision, forward, device) for forward in arguments[:networks]
        )
        return loss(*forwards, *arguments[networks:])

    return in_bf16
