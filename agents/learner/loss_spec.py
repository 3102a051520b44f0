"""What an algorithm passes to the learner: its loss per sample, and how to step on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from steadyrl.agents.learner.optimizers.settings import ADAM, OptimizerSettings

Tensors = tuple[Tensor, ...]
LossScalars = tuple[float | Tensor, ...]


class PerSampleLoss(NamedTuple):
    """Loss, metrics and auxiliary outputs per sample; the learner takes the weighted means."""

    loss: Tensor  # [B]
    metrics: Tensors = ()  # [B] each; their means are logged
    aux: Tensors = ()  # [B] each, detached; returned by `Learner.step`


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """How an algorithm learns from a batch, which is a NamedTuple of tensors [B, …]."""

    # loss(network, *frozen networks, batch, *scalars passed to `Learner.step`)
    loss: Callable[..., PerSampleLoss]
    metrics: tuple[str, ...]  # names of `PerSampleLoss.metrics`
    max_grad_norm: float  # 0 = no clipping
    grad_accumulation: int  # microbatches per batch
    optimizer: OptimizerSettings = ADAM
    # preprocess_batch(batch, sample_weight): on the whole batch, before it is split.
    preprocess_batch: Callable[[Any, Tensor], Any] | None = None
    watched: str | None = None  # a metric that the host reads after every step
    limit: float | None = None  # a step whose watched metric exceeds it is undone
    max_batch_size: int | None = None  # batches of other sizes are padded to it

    def is_within_limit(self, metrics: Tensor) -> Tensor | bool:
        """Return whether a step with this loss and these metrics [1 + K] counts.

        It is a tensor [] if there is a limit, which is not rounded: the host compares it too.
        """
        if self.limit is None:
            return True
        assert self.watched is not None, "a limit is one of the watched metric"
        return metrics[1 + self.metrics.index(self.watched)].double() <= self.limit
