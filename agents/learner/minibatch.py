"""Batches as the learner takes them: of one size, for a graph has one, or cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Padding:
    """Bring batches to one size, because a graph has one.

    What is missing is filled with the first row again, at share 0: no number that the batch has
    not itself.
    """

    def __init__(self, rows: int) -> None:
        self._size = rows
        self._batch: Any = None
        self._views: dict[int, Any] = {}  # its first rows, by their number
        self._sample_weight = torch.empty(0)

    def scratch(self, like: Any, rows: int) -> Any:
        """Return where so many rows of a batch `like` this may be put, to be spared a copy."""
        if self._batch is None:
            self._batch = type(like)(*(t.new_empty((self._size, *t.shape[1:])) for t in like))
            self._sample_weight = torch.empty(self._size, device=like[0].device)
        if rows not in self._views:
            self._views[rows] = type(like)(*(tensor[:rows] for tensor in self._batch))
        return self._views[rows]

    def __call__(self, batch: Any, sample_weight: float | None = None) -> tuple[Any, Tensor]:
        """Return [rows, …] tensors, the same at every call, and the shares [rows] of their rows."""
        rows = len(batch[0])
        scratch = self.scratch(batch, rows)
        if batch is not scratch:
            for view, tensor in zip(scratch, batch, strict=True):
                view.copy_(tensor)
        if rows < self._size:
            for padded in self._batch:
                padded[rows:] = padded[0]
        self._sample_weight[:rows] = 1 / rows if sample_weight is None else sample_weight
        self._sample_weight[rows:] = 0
        return self._batch, self._sample_weight


def index_batches(
    whole: Sequence[Tensor], orders: Iterable[Tensor], count: int, size: int
) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Yield batches for graphs that pick rows themselves, and what each row counts for [size].

    A batch is the places of its rows [size] and all that there is. The rows are those of each
    `order.tensor_split(count)`, never none, filled up with the first of them at share 0. A whole
    order is laid out at once, over the one before: between graphs' turns caches are cold.
    """
    index, sample_weight = torch.empty(count, size, dtype=torch.int64), torch.empty(count, size)
    batches = [((one, *whole), each) for one, each in zip(index, sample_weight, strict=True)]
    there, sample_weights = (
        index.numpy(),
        sample_weight.numpy(),
    )  # NumPy copies so little in a quarter of the time
    for order in orders:
        parts = np.array_split(order.numpy(), min(count, len(order))) if len(order) else []
        for part, rows in enumerate(parts):
            many = len(rows)
            there[part, :many], there[part, many:] = rows, rows[0]
            sample_weights[part, :many], sample_weights[part, many:] = 1 / many, 0
        yield from batches[: len(parts)]


def split(batch: Any, sample_weight: Tensor, count: int) -> list[tuple[Any, Tensor]]:
    """Return pieces of a batch with the shares of their rows."""
    chunks = zip(*(tensor.chunk(count) for tensor in (*batch, sample_weight)), strict=True)
    return [(type(batch)(*fields), part) for *fields, part in chunks]


@torch.no_grad()
def merge(pieces: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the metrics [K] over all pieces, and their reports [B], by those of each."""
    values, *aux = zip(*pieces, strict=True)
    return torch.stack(values).sum(0), *(torch.cat(each) for each in aux)
