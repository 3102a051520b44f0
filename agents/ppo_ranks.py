"""What PPO does when several ranks learn from their rollouts as from one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from agents.normaliser import ObservationNormaliser
from agents.ppo_loss import explained_variance as explained_by_one
from agents.sequences import sequence_minibatches
from agents.world import World
from buffers.rollout import RolloutBatch, RolloutBuffer, pick
from buffers.sequences import SequenceBatch, SequenceRollout


class Part(NamedTuple):
    """This rank's part of a minibatch, and what one of its rows counts for in the whole."""

    batch: RolloutBatch | SequenceBatch
    share: float | Tensor | None  # None: what it is of these rows


def minibatches(
    rollout: RolloutBuffer, count: int, generator: torch.Generator, world: World
) -> Iterator[Part]:
    """Together: yield one epoch, with advantages that are normal over all ranks' rows.

    All ranks go through as many parts, though their valid rows differ; one that has none in a part
    adds a row that counts for nothing.
    """
    if isinstance(rollout, SequenceRollout):
        yield from (Part(*part) for part in sequence_minibatches(rollout, count, generator, world))
        return
    if world.alone:
        yield from (Part(batch, None) for batch in rollout.minibatches(count, generator))
        return
    order, flat = rollout.shuffled(generator).tensor_split(count), rollout.flat()
    moments = torch.stack([_moments(flat.advantage.index_select(0, rows)) for rows in order])
    for rows, (total, first, second) in zip(order, world.sum_(moments).tolist(), strict=True):
        if not total:
            continue
        mean = first / total
        std = max(0.0, second / total - mean**2) ** 0.5
        batch = pick(flat, rows if len(rows) else rows.new_zeros(1))
        normal = (batch.advantage - mean) / (std + 1e-8)
        yield Part(batch._replace(advantage=normal), 1 / total if len(rows) else 0.0)


def move_on(statistics: ObservationNormaliser, rollout: RolloutBuffer | None, piece: int) -> None:
    """Let the statistics of observations take in a rollout, so many rows at a time, and settle."""
    if rollout is None:
        statistics.settle_()
        return
    obs, valid = rollout.obs.flatten(0, 1), rollout.valid
    # Together: as many pieces on all ranks.
    for rows in valid.split(piece) if statistics.world.alone else [valid]:
        statistics.update(obs.index_select(0, rows))


def explained_variance(value: Tensor, return_: Tensor, world: World) -> Tensor:
    """Together: return 1 − Var(R − V) / Var(R) [] over all ranks' rows; 0 for equal returns."""
    if world.alone:
        return explained_by_one(value, return_)
    moments = torch.stack((_moments(return_), _moments(return_ - value)))
    total, first, second = world.sum_(moments).unbind(1)
    spread, unexplained = second / total - (first / total).square()
    return torch.where(spread > 0, 1 - unexplained / spread, 0.0).float()


def _moments(x: Tensor) -> Tensor:
    """Return how many numbers there are, Σx and Σx² [3] in float64."""
    x = x.double()
    return torch.stack((x.new_tensor(len(x)), x.sum(), x.square().sum()))
