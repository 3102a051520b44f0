"""PPO's losses per sample (Schulman et al. 2017), as free functions of tensors.

`build.py` chooses among variants with one signature: `evaluate_batch` and `evaluate_sequences`,
`value_loss` and `clipped_value_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from steadyrl.agents.learner.loss_spec import PerSampleLoss
from steadyrl.agents.networks.distributions import Head
from steadyrl.buffers.rollout.buffer import RolloutBatch
from steadyrl.buffers.rollout.sequences import SequenceBatch

Network = Callable[..., Any]  # observations → policy parameters [B, P], values [B]

METRICS = (
    "train/policy_loss",
    "train/value_loss",
    "train/entropy",
    "train/approx_kl",
    "train/clip_fraction",
)


def ppo_loss(
    network: Network,
    batch: RolloutBatch | SequenceBatch,
    clip: float | Tensor,
    entropy_coef: float | Tensor,
    *,
    head: Head,
    evaluate: Callable[..., PolicyEvaluation],
    value_loss: Callable[..., Tensor],
    value_coef: float,
) -> PerSampleLoss:
    """Return −L^CLIP + c_v·L^VF − c_e·H per sample (equation 9), with its parts as metrics."""
    log_prob, entropy, value = evaluate(network, batch, head)
    log_ratio = log_prob - batch.log_prob
    ratio = log_ratio.exp()
    value_losses = value_loss(value, batch.value, batch.return_, clip)
    policy_losses = policy_loss(ratio, batch.advantage, clip)
    # policy + c_v · value − c_e · entropy, each sum by one kernel.
    losses = torch.add(policy_losses, value_losses, alpha=value_coef)
    losses = subtract_bonus(losses, entropy_coef, entropy)
    with torch.no_grad():
        change = log_ratio.expm1()  # ratio − 1, exact where it is small
        kl = change - log_ratio  # unbiased for KL(old, new) and never negative (Schulman 2020)
        clipped = (change.abs() > clip).float()
    return PerSampleLoss(losses, (policy_losses, value_losses, entropy, kl, clipped))


def policy_loss(ratio: Tensor, advantage: Tensor, clip: float | Tensor) -> Tensor:
    """Return −min(ρA, clip(ρ, 1−ε, 1+ε)A) [B] (equation 7).

    Written as −min(ρA, A + ε|A|), which is the same and has one branch to differentiate.
    """
    return -(ratio * advantage).clamp(max=advantage + clip * advantage.abs())


def value_loss(value: Tensor, old: Tensor, return_: Tensor, clip: float | Tensor) -> Tensor:
    """Return (V − R)² [B]."""
    del old, clip
    return F.mse_loss(value, return_, reduction="none")


def clipped_value_loss(value: Tensor, old: Tensor, return_: Tensor, clip: float | Tensor) -> Tensor:
    """Return max((V − R)², (V_old + clip(V − V_old, −ε, ε) − R)²) [B]."""
    clipped = old + (value - old).clamp(-clip, clip)  # type: ignore[arg-type]
    squares = (F.mse_loss(each, return_, reduction="none") for each in (value, clipped))
    return torch.maximum(*squares)


def subtract_bonus(loss: Tensor, coef: float | Tensor, entropy: Tensor) -> Tensor:
    """Return L − c·H [B]; a graph's coefficient is a tensor, so that it may change."""
    if isinstance(coef, Tensor):
        return loss - coef * entropy
    return torch.sub(loss, entropy, alpha=coef) if coef else loss


class PolicyEvaluation(NamedTuple):
    """A network's evaluation of a batch."""

    log_prob: Tensor  # [B] of the actions taken
    entropy: Tensor  # [B]
    value: Tensor  # [B]


def evaluate_batch(network: Network, batch: RolloutBatch, head: Head) -> PolicyEvaluation:
    """Evaluate independent samples."""
    parameters, value = network(batch.obs)
    return PolicyEvaluation(*head.evaluate(parameters, batch.action), value)


def evaluate_sequences(network: Network, batch: SequenceBatch, head: Head) -> PolicyEvaluation:
    """Evaluate sequences, unrolled from their initial hidden states.

    Masked-out samples get ratio 1: an infinite ratio would make the gradient NaN in spite of a
    sample weight of 0.
    """
    parameters, value, _ = network(batch.obs, batch.hidden_state, batch.episode_starts)
    log_prob, entropy = head.evaluate(parameters, batch.action)
    return PolicyEvaluation(torch.where(batch.loss_mask, log_prob, batch.log_prob), entropy, value)


def with_normalised_advantages(batch: RolloutBatch, sample_weight: Tensor) -> RolloutBatch:
    """Return the minibatch with normalised advantages.

    Means are dot products with `sample_weight` [B]: 1/M for each of M samples, 0 for padding.
    """
    return batch._replace(advantage=normalize_advantage(batch.advantage, sample_weight))


def normalize_advantage(advantage: Tensor, sample_weight: Tensor) -> Tensor:
    """Return (A − mean) / (std + 1e-8) [B]; zeros where all are equal.

    Without subtracting the first, the mean of equal ones may be rounded to another number, and its
    error be normalised to ±1.
    """
    relative = advantage - advantage[0]
    centred = relative - torch.dot(relative, sample_weight)
    return centred / (torch.dot(centred.square(), sample_weight).sqrt() + 1e-8)
