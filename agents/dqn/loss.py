"""DQN's losses as free functions of tensors: TD targets, double DQN, Munchausen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from steadyrl.agents.dqn.q_heads import QHead, gather_actions
from steadyrl.agents.learner.loss_spec import PerSampleLoss
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.buffers.replay.buffer import ReplayBatch

if TYPE_CHECKING:
    from steadyrl.agents.dqn.q_heads import Q


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


def with_noise(network: Q, noise: Tensor) -> Q:
    """Return the network with this noise [K] in its noisy layers."""
    return lambda obs: network(obs, noise)


def td_loss(
    online: Q,
    target: Q,
    batch: ReplayBatch,
    noise: Tensor | None = None,
    *,
    head: QHead,
    double: bool,
    munchausen: Munchausen | None = None,
    masks: Masks | None = None,
) -> PerSampleLoss:
    """Return w · ℓ(Z(s, a), R + discount · Z⁻(s', a*)) per sample, with TD errors as aux output.

    `discount` is γ^m, or 0 after a termination. a* is the greedy action of the online network
    if `double` (van Hasselt et al. 2016), else of the target network, among the allowed ones
    with `masks`. `noise` [3, K] is for Q(s, ·), for Q⁻ and for the network that selects a*.
    """

    def values(outputs: Tensor, obs: Tensor) -> Tensor:
        q = head.values(outputs)
        return q if masks is None else masks.forbid(q, obs)

    action_selector = online
    if noise is not None:
        online, target, action_selector = map(with_noise, (online, target, online), noise)
    outputs = online(batch.obs)
    with torch.no_grad():
        if munchausen is None:
            after = target(batch.next_obs)
            selector_outputs = action_selector(batch.next_obs) if double else after
            from_outputs = not double and masks is None
            atoms, probs = head.best_atoms_and_probs(
                after, values(selector_outputs, batch.next_obs), from_outputs=from_outputs
            )
            reward = batch.reward
        else:
            before, after = target(torch.cat((batch.obs, batch.next_obs))).chunk(2)
            selector_outputs = action_selector(batch.next_obs) if double else after
            atoms, probs = munchausen.mixture(after, values(selector_outputs, batch.next_obs), head)
            reward = batch.reward + munchausen.bonus(values(before, batch.obs), batch.action)
        targets = reward.unsqueeze(1) + batch.discount.unsqueeze(1) * atoms
    prediction = gather_actions(outputs, batch.action)
    each, td_error = head.loss(prediction, targets, probs)
    metrics = (td_error.abs(), head.values(prediction.detach()))
    return PerSampleLoss(batch.weight * each, metrics, (td_error,))
