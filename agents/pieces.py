"""Batches that are learned from in pieces: how they are cut, and what all pieces say together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from agents.learner import RowLoss


def cut(batch: Any, share: Tensor, count: int) -> list[tuple[Any, Tensor]]:
    """Return pieces of a batch with the shares of their rows."""
    if count == 1:
        return [(batch, share)]
    chunks = zip(*(tensor.chunk(count) for tensor in (*batch, share)), strict=True)
    return [(type(batch)(*fields), part) for *fields, part in chunks]


@torch.no_grad()
def told(pieces: list[tuple[RowLoss, Tensor]]) -> tuple[Tensor, ...]:
    """Return the metrics [K] over all pieces, and their reports [B]."""
    means = [torch.mv(torch.stack((r.loss, *r.metrics)), part) for r, part in pieces]
    values = means[0] if len(means) == 1 else torch.stack(means).sum(0)
    reports = pieces[0][0].reports
    if len(pieces) > 1:
        parts = zip(*(rows.reports for rows, _ in pieces), strict=True)
        reports = tuple(torch.cat(each) for each in parts)
    return values, *reports
