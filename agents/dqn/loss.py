"""DQN's loss as free functions of tensors: TD targets, double DQN, Munchausen."""

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
    """Rewards for what the policy is sure of, and soft maxima (Vieillard et al. 2020)."""

    alpha: float
    temperature: float
    log_policy_min: float  # of τ ln π(a|s), which has no bound

    def log_policy(self, values: Tensor) -> Tensor:
        """Return τ ln π(·|s) [B, A] by values [B, A]."""
        return self.temperature * F.log_softmax(values / self.temperature, 1)

    def mixture(self, outputs: Tensor, values: Tensor, head: QHead) -> tuple[Tensor, Tensor]:
        """Return what outputs [B, A, *shape] say of all actions, less τ ln π, each so likely.

        π is that of values [B, A]. The result is a mixture: [B, A · M] returns with probabilities.
        """
        atoms, probs = head.atoms_and_probs(outputs)
        log_policy = self.log_policy(values).unsqueeze(2)
        policy = (log_policy / self.temperature).exp()
        shares = policy / atoms.shape[2] if probs is None else policy * probs
        return (atoms - log_policy).flatten(1), shares.expand_as(atoms).flatten(1)

    def bonus(self, values: Tensor, action: Tensor) -> Tensor:
        """Return α τ ln π(a|s) [B], cut off below."""
        return self.alpha * gather_actions(self.log_policy(values), action).clamp(
            self.log_policy_min, 0
        )


def with_noise(network: Q, noise: Tensor) -> Q:
    """Return the network whose noisy layers take this noise [K]."""
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
    """Return w · ℓ of every row, its TD errors as reports.

    The goals are R + discount · Z⁻(s', a*): `discount` is γ^m, or 0 after a termination, and a* the
    best action by the online network (van Hasselt et al. 2016), or by the target network when not
    double; with `masks` the best that is allowed. `noise` [3, K] is what noisy layers take for each
    of these: Q, Q⁻ and the choice.
    """

    def values(said: Tensor, obs: Tensor) -> Tensor:
        expected = head.values(said)
        return expected if masks is None else masks.forbid(expected, obs)

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
