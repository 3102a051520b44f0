"""How PPO learns from sequences: its loss on whole ones, and minibatches of them on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from agents.heads import Head
from agents.learner import Recipe, RowLoss
from agents.ppo_loss import loss_of, recipe
from agents.ppo_settings import PPOSettings
from agents.world import World
from buffers.sequences import SequenceBatch, SequenceRollout


def sequence_loss(
    network: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    batch: SequenceBatch,
    clip: float | Tensor,
    entropy_coef: float | Tensor,
    *,
    head: Head,
    clip_value: bool,
    value_coef: float,
) -> RowLoss:
    """Return what `ppo_loss` does for every row, unrolled from the carries.

    Rows that do not count have the ratio 1, whatever the network has come to say of them: a share
    of 0 would not save the gradient from an infinite ratio.
    """
    parameters, value, _ = network(batch.obs, batch.carry, batch.starts)
    log_prob, entropy = head.evaluate(parameters, batch.action)
    log_prob = torch.where(batch.counts, log_prob, batch.log_prob)
    return loss_of(
        log_prob,
        entropy,
        value,
        batch,
        clip,
        entropy_coef,
        clip_value=clip_value,
        value_coef=value_coef,
    )


def sequence_recipe(settings: PPOSettings, head: Head) -> Recipe:
    """Return how the learner takes a step on sequences, which come prepared and of one size."""
    return replace(recipe(settings, head, 0, sequence_loss), prepare=None, rows=None)


def sequence_minibatches(
    rollout: SequenceRollout, count: int, generator: torch.Generator, world: World
) -> Iterator[tuple[SequenceBatch, Tensor]]:
    """Together: yield one epoch with the rows' shares, advantages normal over all ranks' rows."""
    parts, advantage = list(rollout.sequences(count, generator)), rollout.flat().advantage
    sums = [_moments(advantage[chosen.rows], chosen.counts) for chosen in parts]
    moments = world.sum_(torch.stack(sums)).tolist()
    for chosen, (total, first, second) in zip(parts, moments, strict=True):
        if not total:
            continue
        mean = first / total
        std = max(0.0, second / total - mean**2) ** 0.5
        batch, counts = rollout.batch(chosen), chosen.counts.float()
        normal = (batch.advantage - mean) / (std + 1e-8) * counts
        yield batch._replace(advantage=normal), counts / total


def _moments(x: Tensor, counts: Tensor) -> Tensor:
    """Return how many numbers count, Σx and Σx² [3] in float64."""
    x = x.double() * counts
    return torch.stack((counts.sum().double(), x.sum(), x.square().sum()))
