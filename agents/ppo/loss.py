"""PPO's losses (Schulman et al. 2017) as free functions of tensors, and its loss specs.

Every mean over a minibatch is a dot product with `sample_weight` [B]: 1/M for each of its M
samples and 0 for padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.networks.distributions import Head
from steadyrl.agents.ppo.settings import PPOSettings
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

ROUNDING = 1e-6**2  # squared rounding error of float32 sums: a smaller relative variance is 0


def sample_loss_spec(
    settings: PPOSettings,
    head: Head,
    max_batch_size: int,
    loss: Callable[..., PerSampleLoss] | None = None,
    gathers_in_graph: type[Any] | None = None,
) -> LossSpec:
    """Return PPO's loss spec for minibatches of at most `max_batch_size` samples.

    `loss` replaces `ppo_loss`. With `gathers_in_graph`, a batch is the samples' indices and all
    fields of the rollout: gathering them inside the graph is cheaper.
    """
    target = settings.largest_kl
    loss = partial(
        loss or ppo_loss, head=head, clip_value=settings.clip_value, value_coef=settings.value_coef
    )
    if not settings.entropy_coef_varies:  # else it is passed to each step
        loss = partial(loss, entropy_coef=settings.entropy_coef)
    return LossSpec(
        loss=loss,
        metrics=METRICS,
        optimizer=settings.optimizer,
        max_grad_norm=settings.max_grad_norm,
        grad_accumulation=settings.grad_accumulation,
        preprocess_batch=normalize_advantages
        if gathers_in_graph is None
        else partial(gather_minibatch, kind=gathers_in_graph),
        watched="train/approx_kl" if settings.adapt_learning_rate == "kl" else None,
        limit=None if target is None else ("train/approx_kl", target),
        max_batch_size=max_batch_size,
    )


def sequence_loss_spec(
    settings: PPOSettings, head: Head, max_batch_size: int, loss: Callable[..., PerSampleLoss]
) -> LossSpec:
    """Return PPO's loss spec for sequences with `max_batch_size` samples, already preprocessed."""
    loss = partial(loss, evaluate=evaluate_sequences)
    microbatches = min(settings.grad_accumulation, max_batch_size // settings.length)
    how = sample_loss_spec(settings, head, max_batch_size, loss)
    return replace(how, preprocess_batch=None, max_batch_size=None, grad_accumulation=microbatches)


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


def ppo_loss(
    network: Network,
    batch: RolloutBatch | SequenceBatch,
    clip: float | Tensor,
    entropy_coef: float | Tensor,
    *,
    head: Head,
    clip_value: bool,
    value_coef: float,
    evaluate: Callable[..., PolicyEvaluation] = evaluate_batch,
) -> PerSampleLoss:
    """Return −min(ρA, …) + c_v·ℓ(V) − c_e·H per sample (equation 9), with its parts as metrics."""
    log_prob, entropy, value = evaluate(network, batch, head)
    log_ratio = log_prob - batch.log_prob
    ratio = log_ratio.exp()
    if clip_value:
        value_losses = clipped_value_loss(value, batch.value, batch.return_, clip)
    else:
        value_losses = value_loss(value, batch.return_)
    policy = policy_loss(ratio, batch.advantage, clip)
    each = torch.add(policy, value_losses, alpha=value_coef)
    if isinstance(entropy_coef, Tensor):
        each = each - entropy_coef * entropy
    elif entropy_coef:
        each = torch.sub(each, entropy, alpha=entropy_coef)
    with torch.no_grad():
        change = ratio - 1
        kl = change - log_ratio  # unbiased for KL(old, new) and never negative (Schulman 2020)
        clipped = (change.abs() > clip).float()
    return PerSampleLoss(each, (policy, value_losses, entropy, kl, clipped))


def normalize_advantages(batch: RolloutBatch, sample_weight: Tensor) -> RolloutBatch:
    """Return the minibatch with normalised advantages."""
    return batch._replace(advantage=normalize_advantage(batch.advantage, sample_weight))


def gather_minibatch(whole: tuple[Tensor, ...], sample_weight: Tensor, kind: type[Any]) -> Any:
    """Gather the minibatch with these indices [B], the first tensor; normalise its advantages."""
    indices, *fields = whole
    batch = kind(*(field.index_select(0, indices) for field in fields))
    return normalize_advantages(batch, sample_weight)


def normalize_advantage(advantage: Tensor, sample_weight: Tensor) -> Tensor:
    """Return (A − mean) / (std + 1e-8) [B]; zeros for a minibatch of one."""
    centred = advantage - torch.dot(advantage, sample_weight)
    return centred / (torch.dot(centred.square(), sample_weight).sqrt() + 1e-8)


def policy_loss(ratio: Tensor, advantage: Tensor, clip: float | Tensor) -> Tensor:
    """Return −min(ρA, clip(ρ, 1−ε, 1+ε)A) [B] (equation 7).

    Written as −min(ρA, A + ε|A|), which is the same and has one branch to differentiate.
    """
    return -(ratio * advantage).clamp(max=advantage + clip * advantage.abs())


def value_loss(value: Tensor, return_: Tensor) -> Tensor:
    """Return (V − R)² [B]."""
    return F.mse_loss(value, return_, reduction="none")


def clipped_value_loss(value: Tensor, old: Tensor, return_: Tensor, clip: float | Tensor) -> Tensor:
    """Return max((V − R)², (V_old + clip(V − V_old, −ε, ε) − R)²) [B]."""
    clipped = old + (value - old).clamp(-clip, clip)  # type: ignore[arg-type]
    return torch.maximum(value_loss(value, return_), value_loss(clipped, return_))


def explained_variance(value: Tensor, return_: Tensor, comm: Comm = SINGLE_PROCESS) -> Tensor:
    """Collective: return 1 − Var(R − V) / Var(R) [] over all ranks' samples; 0 for equal returns.

    Returns are sums of advantages and values; differences within their rounding error are 0.
    """
    parts = torch.stack((return_, return_ - value))
    if comm.is_single:
        value_losses = parts.square().mean(1)
        spread, unexplained = parts.var(1, correction=0)
    else:
        total, first, second = comm.all_reduce_(torch.stack([*map(count_sum_sumsq, parts)])).unbind(
            1
        )
        value_losses = second / total
        spread, unexplained = value_losses - (first / total).square()
    varies = spread > ROUNDING * value_losses.sum()
    return torch.where(varies, 1 - unexplained / spread, 0.0).float()


def count_sum_sumsq(x: Tensor) -> Tensor:
    """Return count, Σx and Σx² [3] in float64."""
    x = x.double()
    return torch.stack((x.new_tensor(len(x)), x.sum(), x.square().sum()))
