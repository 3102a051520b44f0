"""Running statistics of a network, saved with its weights."""

from __future__ import annotations

from abc import abstractmethod

from torch import nn


class Statistics(nn.Module):
    """A layer whose buffers are running statistics."""

    @abstractmethod
    def check_ranges(self) -> None:
        """Raise ValueError if no data can have led to these statistics."""
