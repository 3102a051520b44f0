"""Frozen copies of networks for those who act while another learns."""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def clone_for_inference(network: Network) -> Network:
    """Return a frozen copy that shares no memory with `network`, not even its gradients.

    Call it on the thread that trains, between updates: then whoever uses the copy, on whatever
    thread, sees the weights of one moment.
    """
    clone = deepcopy(network)
    for parameter in clone.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return clone.eval()
