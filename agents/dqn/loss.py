"""DQN's losses as free functions of tensors: TD targets, double DQN, Munchausen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from steadyrl.agents.dqn.q_heads import Q, QHead, gather_actions
from steadyrl.agents.learner.loss_spec import PerSampleLoss
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.buffers.replay.buffer import ReplayBatch

METRICS = ("train/td_error", "train/q_mean")


@dataclass(frozen=True, kw_only=True)
class Munchausen:
    """Munchausen DQN (Vieillard et al. 2020): log-policy bonus and soft targets."""

    alpha: float
    temperature: float
    log_policy_min: float  # lower bound of τ ln π(a|s)

    def log_policy(self, values: Tensor) -> Tensor:
        """Return τ ln π(·|s) [B, A] for Q-values [B, A]."""
        return self.temperature * F.log_softmax(values / self.temperature, 1)

    def mixture(self, outputs: Tensor, values: Tensor, head: QHead) -> tuple[Tensor, Tensor]:
        """Return the atoms and probabilities [B, A·M] of Z(s, a) − τ ln π(a|s), a ~ π(·|s).

        `outputs` [B, A, *shape] are those of Z, `values` [B, A] the Q-values that define π.
        """
        atoms, probs = head.atoms_and_probs(outputs)
        log_policy = self.log_policy(values).unsqueeze(2)
        policy = (log_policy / self.temperature).exp()
        weights = policy / atoms.shape[2] if probs is None else policy * probs
        return (atoms - log_policy).flatten(1), weights.expand_as(atoms).flatten(1)

    def bonus(self, values: Tensor, action: Tensor) -> Tensor:
        """Return α τ ln π(a|s) [B], clipped from below."""
        return self.alpha * gather_actions(self.log_policy(values), action).clamp(
            self.log_policy_min, 0
        )


def td_loss(
    online: Q,
    target: Q,
    batch: ReplayBatch,
    noise: Tensor | None = None,
    *,
    head: QHead,
    double: bool,
    masks: Masks | None = None,
) -> PerSampleLoss:
    """Return w · ℓ(Z(s, a), R + γᵐ Z⁻(s', argmax Q(s', ·))) per sample, and the TD errors.

    γᵐ is `batch.discount`, 0 after a termination. The argmax is of the online network if `double`
    (van Hasselt et al. 2016), else of the target network, among the allowed actions with `masks`.
    `noise` [3, K] is for Q(s, ·), for Q⁻ and for the network that selects the argmax.
    """
    online, target, selector = with_noise(online, target, noise)
    outputs = online(batch.obs)
    with torch.no_grad():
        next_outputs = target(batch.next_obs)
        next_values = q_values(
            head, selector(batch.next_obs) if double else next_outputs, batch.next_obs, masks
        )
        atoms, probs = head.atoms_and_probs(gather_actions(next_outputs, next_values.argmax(1)))
        targets = batch.reward.unsqueeze(1) + batch.discount.unsqueeze(1) * atoms
    return loss_towards(targets, probs, outputs, batch, head)


def munchausen_td_loss(
    online: Q,
    target: Q,
    batch: ReplayBatch,
    noise: Tensor | None = None,
    *,
    head: QHead,
    double: bool,
    munchausen: Munchausen,
    masks: Masks | None = None,
) -> PerSampleLoss:
    """Return w · ℓ(Z(s, a), R + ατ ln π(a|s) + γᵐ E_{a'~π}[Z⁻(s', a') − τ ln π(a'|s')]) per sample.

    π = softmax(Q⁻/τ), of the online network at s' if `double`; the rest as in `td_loss`.
    """
    online, target, selector = with_noise(online, target, noise)
    outputs = online(batch.obs)
    with torch.no_grad():
        now, next_outputs = target(torch.cat((batch.obs, batch.next_obs))).chunk(2)
        next_values = q_values(
            head, selector(batch.next_obs) if double else next_outputs, batch.next_obs, masks
        )
        atoms, probs = munchausen.mixture(next_outputs, next_values, head)
        reward = batch.reward + munchausen.bonus(
            q_values(head, now, batch.obs, masks), batch.action
        )
        targets = reward.unsqueeze(1) + batch.discount.unsqueeze(1) * atoms
    return loss_towards(targets, probs, outputs, batch, head)


def loss_towards(
    targets: Tensor, probs: Tensor | None, outputs: Tensor, batch: ReplayBatch, head: QHead
) -> PerSampleLoss:
    """Return the weighted losses of Z(s, a) against the atoms and probabilities [B, M] of targets.

    `outputs` [B, A, *shape] are those of Z(s, ·).
    """
    prediction = gather_actions(outputs, batch.action)
    losses, td_error = head.loss(prediction, targets, probs)
    metrics = (td_error.abs(), head.values(prediction.detach()))
    return PerSampleLoss(batch.weight * losses, metrics, (td_error,))


def q_values(head: QHead, outputs: Tensor, obs: Tensor, masks: Masks | None) -> Tensor:
    """Return the expected returns [B, A], with those of forbidden actions at the bottom."""
    values = head.values(outputs)
    return values if masks is None else masks.forbid(values, obs)


def with_noise(online: Q, target: Q, noise: Tensor | None) -> tuple[Q, Q, Q]:
    """Return online, target and action-selecting network, with `noise` [3, K] if layers take it."""
    if noise is None:
        return online, target, online

    def noisy(network: Q, noise: Tensor) -> Q:
        return lambda obs: network(obs, noise)

    first, second, third = map(noisy, (online, target, online), noise)
    return first, second, third
