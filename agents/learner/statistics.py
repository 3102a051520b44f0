"""Running statistics of a network, saved with its weights; sums that statistics are from."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn


class Statistics(nn.Module):
    """A layer whose buffers are running statistics."""

    @abstractmethod
    def check_ranges(self) -> None:
        """Raise ValueError if no data can have led to these statistics."""


def count_sum_sumsq(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return count, Σx and Σx² [3] in float64; of the numbers in `mask`, if given."""
    x = x.double()
    count = x.new_tensor(len(x)) if mask is None else mask.sum().double()
    x = x if mask is None else x * mask
    return torch.stack((count, x.sum(), x.square().sum()))
