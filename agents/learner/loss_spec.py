"""What an algorithm hands to the learner: how (networks, batch) become the loss of every row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

Tensors = tuple[Tensor, ...]
LossScalars = tuple[float | Tensor, ...]


class PerSampleLoss(NamedTuple):
    """What a loss says about each of B rows; the learner takes the means."""

    loss: Tensor  # [B]
    metrics: Tensors = ()  # [B] each: their means are logged
    aux: Tensors = ()  # [B] each: given back as they are, detached


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """How an algorithm learns from a batch, a NamedTuple of tensors [B, …]."""

    # Of the network, the frozen networks, the batch and the numbers given to `step`, in this order.
    loss: Callable[..., PerSampleLoss]
    metrics: tuple[str, ...]  # the names of `PerSampleLoss.metrics`
    epsilon: float  # of Adam
    max_grad_norm: float  # 0 = no clipping
    grad_accumulation: int  # pieces that a batch is cut into
    # What must be known of the whole batch before it is cut: of the batch and each row's share.
    preprocess_batch: Callable[[Any, Tensor], Any] | None = None
    # A metric and how large it may be: a step that starts beyond it is undone.
    limit: tuple[str, float] | None = None
    max_batch_size: int | None = None  # of the largest batch, where batches differ in size
