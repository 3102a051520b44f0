"""What a network keeps of the rows it has seen, besides its weights."""

from __future__ import annotations

from abc import abstractmethod

from torch import nn


class Statistics(nn.Module):
    """A layer with running statistics as its buffers."""

    @abstractmethod
    def check_ranges(self) -> None:
        """Raise ValueError where they are those of no rows."""
