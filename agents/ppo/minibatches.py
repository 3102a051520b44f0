"""Minibatches of PPO: indices for graphs that gather samples, and those of ranks.

Plain ones are `agents/rollout_agent.py: shuffled_minibatches`, those of sequences are in
`recurrent.py`. `build.py` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.statistics import count_sum_sumsq
from steadyrl.agents.ppo.loss import with_normalised_advantages
from steadyrl.agents.rollout_agent import Minibatch, Minibatches
from steadyrl.buffers.rollout.buffer import RolloutBuffer, gather_minibatch


def indexed_minibatches(*, epochs: int, count: int, max_batch_size: int) -> Minibatches:
    """Return minibatches for graphs that gather samples themselves, by `gather_indexed`."""

    def minibatches(rollout: RolloutBuffer, order: torch.Generator) -> Iterator[Minibatch]:
        orders = (rollout.shuffled(order) for _ in range(epochs))
        return index_batches(rollout.flat(), orders, count, max_batch_size)

    return minibatches


def index_batches(
    whole: Sequence[Tensor], orders: Iterable[Tensor], count: int, size: int
) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Yield batches for graphs that gather samples themselves, with sample weights [size].

    A batch is the indices of its samples [size] and all tensors of the rollout. Its samples are
    those of one part of `order.tensor_split(count)`, padded with its first sample at weight 0.
    All parts of an order are written at once: between two runs of a graph caches are cold.
    """
    index, sample_weight = torch.empty(count, size, dtype=torch.int64), torch.empty(count, size)
    batches = [((one, *whole), each) for one, each in zip(index, sample_weight, strict=True)]
    # NumPy copies so few numbers in a quarter of torch's time.
    index_array, weight_array = index.numpy(), sample_weight.numpy()
    for order in orders:
        parts = np.array_split(order.numpy(), min(count, len(order))) if len(order) else []
        for part, indices in enumerate(parts):
            many = len(indices)
            index_array[part, :many], index_array[part, many:] = indices, indices[0]
            weight_array[part, :many], weight_array[part, many:] = 1 / many, 0
        yield from batches[: len(parts)]


def gather_indexed(whole: tuple[Tensor, ...], sample_weight: Tensor, kind: type[Any]) -> Any:
    """Gather the minibatch with these indices [B], the first tensor; normalise its advantages."""
    indices, *fields = whole
    batch = kind(*(field.index_select(0, indices) for field in fields))
    return with_normalised_advantages(batch, sample_weight)


def rank_minibatches(*, epochs: int, count: int, comm: Comm) -> Minibatches:
    """Return this rank's parts of minibatches of all ranks."""

    def minibatches(rollout: RolloutBuffer, order: torch.Generator) -> Iterator[Minibatch]:
        for _ in range(epochs):
            yield from epoch_of_ranks(rollout, count, order, comm)

    return minibatches


def epoch_of_ranks(
    rollout: RolloutBuffer, count: int, generator: torch.Generator, comm: Comm
) -> Iterator[Minibatch]:
    """Collective: yield one epoch, with advantages normalised over the samples of all ranks.

    Every rank yields the same number of minibatches. A rank without samples in one contributes
    a sample with weight 0.
    """
    order, flat = rollout.shuffled(generator).tensor_split(count), rollout.flat()
    moments = torch.stack([count_sum_sumsq(flat.advantage.index_select(0, part)) for part in order])
    for indices, (samples, *sums) in zip(order, comm.all_reduce_(moments).tolist(), strict=True):
        if not samples:
            continue
        batch = gather_minibatch(flat, indices if len(indices) else indices.new_zeros(1))
        normal = normalize_by_moments(batch.advantage, samples, *sums)
        yield batch._replace(advantage=normal), 1 / samples if len(indices) else 0.0


def normalize_by_moments(x: Tensor, count: float, total: float, squares: float) -> Tensor:
    """Return (x − mean) / (std + 1e-8), with the moments count, Σx and Σx² of all ranks."""
    mean = total / count
    std: float = max(0.0, squares / count - mean**2) ** 0.5
    return ((x.double() - mean) / (std + 1e-8)).float()
