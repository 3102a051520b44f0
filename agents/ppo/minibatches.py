"""Minibatches of PPO: indices for graphs that gather samples, and those of ranks.

Plain ones are `agents/rollout_agent.py: shuffled`, sequences `recurrent.py`. `build.py` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.minibatch import index_batches
from steadyrl.agents.ppo.loss import normalize_advantages
from steadyrl.agents.rollout_agent import Minibatch, Minibatches
from steadyrl.buffers.rollout.buffer import RolloutBuffer, gather_minibatch


def indexed(*, epochs: int, count: int, max_batch_size: int) -> Minibatches:
    """Return minibatches for graphs that gather samples themselves, by `gather_indexed`."""

    def minibatches(rollout: RolloutBuffer, order: torch.Generator) -> Iterator[Minibatch]:
        orders = (rollout.shuffled(order) for _ in range(epochs))
        return index_batches(rollout.flat(), orders, count, max_batch_size)

    return minibatches


def gather_indexed(whole: tuple[Tensor, ...], sample_weight: Tensor, kind: type[Any]) -> Any:
    """Gather the minibatch with these indices [B], the first tensor; normalise its advantages."""
    indices, *fields = whole
    batch = kind(*(field.index_select(0, indices) for field in fields))
    return normalize_advantages(batch, sample_weight)


def of_ranks(*, epochs: int, count: int, comm: Comm) -> Minibatches:
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
    for indices, (total, first, second) in zip(
        order, comm.all_reduce_(moments).tolist(), strict=True
    ):
        if not total:
            continue
        mean = first / total
        std = max(0.0, second / total - mean**2) ** 0.5
        batch = gather_minibatch(flat, indices if len(indices) else indices.new_zeros(1))
        normal = (batch.advantage - mean) / (std + 1e-8)
        yield batch._replace(advantage=normal), 1 / total if len(indices) else 0.0


def count_sum_sumsq(x: Tensor) -> Tensor:
    """Return count, Σx and Σx² [3] in float64."""
    x = x.double()
    return torch.stack((x.new_tensor(len(x)), x.sum(), x.square().sum()))
