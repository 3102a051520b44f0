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
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.distributions import Head
from steadyrl.agents.ppo.loss import PolicyEvaluation

METRIC = "train/teacher_loss"


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


def distilled_ppo_loss(
    network: Callable[..., Any],
    batch: Any,
    teacher_coef: float | Tensor,
    *scalars: float | Tensor,
    loss: Callable[..., PerSampleLoss],
    head: Head,
    evaluate: Callable[..., PolicyEvaluation],
) -> PerSampleLoss:
    """Return PPO's `loss` + c·H(π_teacher, π) per sample; `evaluate` is the loss's own.

    Samples in which the teacher acted are off-policy: their advantage is 0, so only the value
    and distillation terms learn from them. Their ratio is 1: the ratio of an action that the
    policy did not sample may be infinite and says nothing about the KL divergence.
    """
    base_batch = batch._replace(advantage=batch.advantage * batch.student_acted)
    network, outputs = record_outputs(network)

    def evaluate_student_samples(*arguments: Any) -> PolicyEvaluation:
        evaluation = evaluate(*arguments)
        return evaluation._replace(
            log_prob=torch.where(batch.student_acted, evaluation.log_prob, batch.log_prob)
        )

    losses = loss(network, base_batch, *scalars, evaluate=evaluate_student_samples)
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
    noise: Tensor | None = None,
    *,
    loss: Callable[..., PerSampleLoss],
    head: QHead,
    temperature: float,
    masks: Masks | None = None,
) -> PerSampleLoss:
    """Return DQN's `loss` + c·w·H(π_teacher, softmax(Q(s, ·)/τ)) per sample, of allowed actions."""
    online, outputs = record_outputs(online)
    losses = loss(online, target, batch, noise)
    values = q_values(head, outputs[0], batch.obs, masks)  # the first forward pass: Q(s, ·)
    distillation_loss = -(batch.teacher_target * F.log_softmax(values / temperature, 1)).sum(1)
    return PerSampleLoss(
        losses.loss + teacher_coef * batch.weight * distillation_loss,
        (*losses.metrics, teacher_loss_metric(distillation_loss, teacher_coef)),
        losses.aux,
    )
