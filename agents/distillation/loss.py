"""Losses with a distillation term: kickstarting (Schmitt et al. 2018), for PPO and DQN.

c·H(π_teacher, π_student) is added to the algorithm's loss, with c annealed to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from steadyrl.agents.distillation.teacher import is_categorical
from steadyrl.agents.dqn.loss import q_values
from steadyrl.agents.dqn.q_heads import Q, QHead
from steadyrl.agents.extension import with_fields
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.distributions import Head
from steadyrl.agents.ppo.loss import PolicyEvaluation, normalize_advantage

METRIC = "train/teacher_loss"
OF_STUDENT = ("train/approx_kl", "train/clip_fraction")  # means over the student's samples


def add_teacher_loss(loss_spec: LossSpec, loss: Callable[..., PerSampleLoss]) -> LossSpec:
    """Return the loss spec with a loss that has a distillation term, also as a metric."""
    return replace(loss_spec, loss=loss, metrics=(*loss_spec.metrics, METRIC))


def cross_entropy(head: Head, parameters: Tensor, teacher_target: Tensor) -> Tensor:
    """Return −Σ p log π [B] for probabilities p [B, n], else −log π(a) for actions a [B, K]."""
    if is_categorical(head):
        return -(teacher_target * F.log_softmax(parameters, -1)).sum(-1)
    return -head.log_prob(parameters, teacher_target)


def record_outputs(network: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return the network, wrapped to record its outputs, and the list of them."""
    outputs: list[Any] = []

    def recorded_forward(*inputs: Tensor) -> Any:
        outputs.append(network(*inputs))
        return outputs[-1]

    return recorded_forward, outputs


def teacher_loss_metric(distillation_loss: Tensor, teacher_coef: float | Tensor) -> Tensor:
    """Return the metric [B], 0 where the coefficient is 0: targets are stale by then."""
    return distillation_loss.detach() * (teacher_coef > 0)


def with_student_samples(
    batch: Any, sample_weight: Tensor, *, preprocess: Callable[[Any, Tensor], Any] | None
) -> Any:
    """Return the whole batch, preprocessed, with the student's advantages and `student_scale` [B].

    Advantages are normalised over the student's samples; the teacher's, which are off-policy, and
    padding's are 0. They may be normalised over all samples before: that is affine. A weighted mean
    over the batch of what `student_scale` multiplies is one over the student's samples, 0 without
    any.
    """
    batch = batch if preprocess is None else preprocess(batch, sample_weight)
    own = sample_weight * batch.student_acted
    fraction = own.sum().clamp(min=1e-8)
    advantage = normalize_advantage(batch.advantage, own / fraction)
    batch = batch._replace(advantage=torch.where(own > 0, advantage, 0.0))
    return with_fields(batch, {"student_scale": batch.student_acted / fraction})


def student_ppo_loss(
    network: Callable[..., Any],
    batch: Any,
    *scalars: float | Tensor,
    loss: Callable[..., PerSampleLoss],
    evaluate: Callable[..., PolicyEvaluation],
    metrics: tuple[str, ...],
) -> PerSampleLoss:
    """Return PPO's `loss` where a teacher acts too; `evaluate` and `metrics` are the loss's own.

    Of samples in which the teacher acted, whose advantage is 0, only the value term learns. Their
    ratio is 1: the ratio of an action that the policy did not sample may be infinite and says
    nothing about the KL divergence, whose mean is over the student's samples.
    """

    def evaluate_student_samples(*arguments: Any) -> PolicyEvaluation:
        evaluation = evaluate(*arguments)
        return evaluation._replace(
            log_prob=torch.where(batch.student_acted, evaluation.log_prob, batch.log_prob)
        )

    losses = loss(network, batch, *scalars, evaluate=evaluate_student_samples)
    scaled = (
        values * batch.student_scale if name in OF_STUDENT else values
        for name, values in zip(metrics, losses.metrics, strict=True)
    )
    return losses._replace(metrics=tuple(scaled))


def distilled_ppo_loss(
    network: Callable[..., Any],
    batch: Any,
    teacher_coef: float | Tensor,
    *scalars: float | Tensor,
    loss: Callable[..., PerSampleLoss],
    head: Head,
) -> PerSampleLoss:
    """Return PPO's `loss` + c·H(π_teacher, π) per sample."""
    network, outputs = record_outputs(network)
    losses = loss(network, batch, *scalars)
    parameters = outputs[0][0]
    distillation_loss = cross_entropy(head, parameters, batch.teacher_target)
    return PerSampleLoss(
        losses.loss + teacher_coef * distillation_loss,
        (*losses.metrics, teacher_loss_metric(distillation_loss, teacher_coef)),
    )


def distilled_td_loss(
    online: Q,
    target: Q,
    batch: Any,
    teacher_coef: float | Tensor,
    *scalars: float | Tensor,
    loss: Callable[..., PerSampleLoss],
    head: QHead,
    temperature: float,
    masks: Masks | None = None,
) -> PerSampleLoss:
    """Return DQN's `loss` + c·w·H(π_teacher, softmax(Q(s, ·)/τ)) per sample, of allowed actions."""
    online, outputs = record_outputs(online)
    losses = loss(online, target, batch, *scalars)
    values = q_values(head, outputs[0], batch.obs, masks)  # the first forward pass: Q(s, ·)
    distillation_loss = -(batch.teacher_target * F.log_softmax(values / temperature, 1)).sum(1)
    return PerSampleLoss(
        losses.loss + teacher_coef * batch.weight * distillation_loss,
        (*losses.metrics, teacher_loss_metric(distillation_loss, teacher_coef)),
        losses.aux,
    )
