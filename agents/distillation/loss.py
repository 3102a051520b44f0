"""Losses with a teacher's part: kickstarting (Schmitt et al. 2018), for PPO and DQN.

To PPO's or DQN's own loss comes c·H(π_teacher, π_student), c annealed to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from steadyrl.agents.distillation.rollout import TaughtBatch, TaughtSequences
from steadyrl.agents.distillation.teacher import is_choice
from steadyrl.agents.dqn.loss import td_loss
from steadyrl.agents.dqn.q_heads import Q, QHead
from steadyrl.agents.learner.loss_spec import Recipe, RowLoss
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.distributions import Head
from steadyrl.agents.ppo.loss import Said, ppo_loss, said_of_rows
from steadyrl.buffers.replay.buffer import ReplayBatch
from steadyrl.buffers.rollout.buffer import RolloutBatch

METRIC = "train/teacher_loss"


class TaughtReplayBatch(NamedTuple):
    """A `ReplayBatch` and what the teacher says of it."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_obs: Tensor
    weight: Tensor
    index: Tensor  # type: ignore[assignment]
    lesson: Tensor  # [B, A] how likely each action is


def with_teacher(recipe: Recipe, loss: Callable[..., RowLoss]) -> Recipe:
    """Return the recipe with a loss that has a teacher's part, and that as a metric."""
    return replace(recipe, loss=loss, metrics=(*recipe.metrics, METRIC))


def cross_entropy(head: Head, parameters: Tensor, lesson: Tensor) -> Tensor:
    """Return −Σ p log π [B] for a distribution p [B, n], else −log π(a) of actions a [B, K]."""
    if is_choice(head):
        return -(lesson * F.log_softmax(parameters, -1)).sum(-1)
    return -head.log_prob(parameters, lesson)


def remembering(network: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return the network, and what it says from now on."""
    told: list[Any] = []

    def remembered(*inputs: Tensor) -> Any:
        told.append(network(*inputs))
        return told[-1]

    return remembered, told


def told_of(taught: Tensor, teacher_coef: float | Tensor) -> Tensor:
    """Return the metric [B]: none once the teacher is not asked, and what it said is no more."""
    return taught.detach() * (teacher_coef > 0)


def taught_ppo_loss(
    network: Callable[..., Any],
    batch: TaughtBatch | TaughtSequences,
    teacher_coef: float | Tensor,
    clip: float | Tensor,
    entropy_coef: float | Tensor,
    *,
    head: Head,
    said_of: Callable[..., Said] = said_of_rows,
    **switches: Any,
) -> RowLoss:
    """Return PPO's loss of every row and c·H(π_teacher, π).

    A row that the teacher acted in is not the policy's own: its advantage is none, so that only
    the value and the teacher's part learn from it. Its ratio is 1: how likely the policy makes an
    action that it has not drawn says nothing of its KL divergence, and may be infinite.
    """
    own = cast(RolloutBatch, batch._replace(advantage=batch.advantage * batch.own))
    network, told = remembering(network)

    def said_of_own(*asked: Any) -> Said:
        said = said_of(*asked)
        return said._replace(log_prob=torch.where(batch.own, said.log_prob, batch.log_prob))

    rows = ppo_loss(network, own, clip, entropy_coef, head=head, said_of=said_of_own, **switches)
    parameters = told[0][0]
    taught = cross_entropy(head, parameters, batch.lesson)
    return RowLoss(
        rows.loss + teacher_coef * taught, (*rows.metrics, told_of(taught, teacher_coef))
    )


def taught_td_loss(
    online: Q,
    target: Q,
    batch: TaughtReplayBatch,
    teacher_coef: float | Tensor,
    noise: Tensor | None = None,
    *,
    head: QHead,
    temperature: float,
    masks: Masks | None = None,
    **switches: Any,
) -> RowLoss:
    """Return DQN's loss of every row and c·w·H(π_teacher, softmax(Q(s, ·)/τ)), over the allowed."""
    online, told = remembering(online)
    own, switches = cast(ReplayBatch, batch), {"masks": masks, **switches}
    rows = td_loss(online, target, own, noise, head=head, **switches)
    values = head.values(told[0])  # what is learned is asked first: Q(s, ·)
    if masks is not None:
        values = masks.forbid(values, batch.obs)
    taught = -(batch.lesson * F.log_softmax(values / temperature, 1)).sum(1)
    loss = rows.loss + teacher_coef * batch.weight * taught
    return RowLoss(loss, (*rows.metrics, told_of(taught, teacher_coef)), rows.reports)
