"""Batches in the form that a step takes: padded to one size for a graph, or split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss


class Padding:
    """Pad batches to a fixed size, as a graph needs it.

    Padding repeats the first sample with weight 0, so it adds no value that the batch lacks.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._size = max_batch_size
        self._batch: Any = None
        self._views: dict[int, Any] = {}  # batch size → view of the first samples
        self._sample_weight = torch.empty(0)

    def scratch(self, like: Any, batch_size: int) -> Any:
        """Return buffers for `batch_size` samples like these; batches built there need no copy."""
        if self._batch is None:
            self._batch = type(like)(*(t.new_empty((self._size, *t.shape[1:])) for t in like))
            self._sample_weight = torch.empty(self._size, device=like[0].device)
        if batch_size not in self._views:
            self._views[batch_size] = type(like)(*(tensor[:batch_size] for tensor in self._batch))
        return self._views[batch_size]

    def __call__(self, batch: Any, sample_weight: float | None = None) -> tuple[Any, Tensor]:
        """Return the padded tensors, the same at every call, and their sample weights."""
        batch_size = len(batch[0])
        scratch = self.scratch(batch, batch_size)
        if batch is not scratch:
            for view, tensor in zip(scratch, batch, strict=True):
                view.copy_(tensor)
        if batch_size < self._size:
            for padded in self._batch:
                padded[batch_size:] = padded[0]
        self._sample_weight[:batch_size] = (
            1 / batch_size if sample_weight is None else sample_weight
        )
        self._sample_weight[batch_size:] = 0
        return self._batch, self._sample_weight


def microbatches(spec: LossSpec, batch: Any, sample_weight: Tensor) -> list[tuple[Any, Tensor]]:
    """Preprocess the whole batch, then split it into microbatches with their sample weights."""
    if spec.preprocess_batch is not None:
        batch = spec.preprocess_batch(batch, sample_weight)
    if spec.grad_accumulation == 1:
        return [(batch, sample_weight)]
    parts = (tensor.chunk(spec.grad_accumulation) for tensor in (*batch, sample_weight))
    return [(type(batch)(*fields), weight) for *fields, weight in zip(*parts, strict=True)]


def sample_weights(batch: Any, weight: float | Tensor | None) -> Tensor:
    """Return the weights of samples [B] in their mean: given, or the same for all (None: 1/B)."""
    if isinstance(weight, Tensor):
        return weight
    samples = len(batch[0])
    return torch.full((samples,), 1 / samples if weight is None else weight, device=batch[0].device)


@torch.no_grad()
def weighted_means(losses: PerSampleLoss, sample_weight: Tensor) -> tuple[Tensor, ...]:
    """Return the weighted means [K] of loss and metrics over the batch, and the aux outputs [B]."""
    return torch.mv(torch.stack((losses.loss, *losses.metrics)), sample_weight), *losses.aux


@torch.no_grad()
def merge(microbatches: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the metrics [K] summed over microbatches, and their aux outputs [B] concatenated."""
    if len(microbatches) == 1:
        return microbatches[0]
    values, *aux = zip(*microbatches, strict=True)
    return torch.stack(values).sum(0), *(torch.cat(each) for each in aux)
