"""Batches that are learned from in pieces: how they are cut, and what all pieces say together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def cut(batch: Any, share: Tensor, count: int) -> list[tuple[Any, Tensor]]:
    """Return pieces of a batch with the shares of their rows."""
    chunks = zip(*(tensor.chunk(count) for tensor in (*batch, share)), strict=True)
    return [(type(batch)(*fields), part) for *fields, part in chunks]


@torch.no_grad()
def together(pieces: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the metrics [K] over all pieces, and their reports [B], by those of each."""
    values, *reports = zip(*pieces, strict=True)
    return torch.stack(values).sum(0), *(torch.cat(each) for each in reports)
