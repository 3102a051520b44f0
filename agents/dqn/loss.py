"""DQN's loss as free functions of tensors: TD targets, double DQN, Munchausen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from steadyrl.agents.dqn.q_heads import QHead, said_of
from steadyrl.agents.learner.loss_spec import RowLoss
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
    lowest: float  # of τ ln π(a|s), which has no bound

    def log_policy(self, values: Tensor) -> Tensor:
        """Return τ ln π(·|s) [B, A] by values [B, A]."""
        return self.temperature * F.log_softmax(values / self.temperature, 1)

    def returns(self, outputs: Tensor, values: Tensor, head: QHead) -> tuple[Tensor, Tensor]:
        """Return what outputs [B, A, *shape] say of all actions, less τ ln π, each so likely.

        π is that of values [B, A]. The result is a mixture: [B, A · M] returns with probabilities.
        """
        returns, likely = head.returns(outputs)
        log_policy = self.log_policy(values).unsqueeze(2)
        policy = (log_policy / self.temperature).exp()
        shares = policy / returns.shape[2] if likely is None else policy * likely
        return (returns - log_policy).flatten(1), shares.expand_as(returns).flatten(1)

    def bonus(self, values: Tensor, action: Tensor) -> Tensor:
        """Return α τ ln π(a|s) [B], cut off below."""
        return self.alpha * said_of(self.log_policy(values), action).clamp(self.lowest, 0)


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
) -> RowLoss:
    """Return w · ℓ of every row, its TD errors as reports.

    The goals are R + discount · Z⁻(s', a*): `discount` is γ^m, or 0 after a termination, and a* the
    best action by the online network (van Hasselt et al. 2016), or by the target network when not
    double; with `masks` the best that is allowed. `noise` [3, K] is what noisy layers take for each
    of these: Q, Q⁻ and the choice.
    """

    def values(said: Tensor, obs: Tensor) -> Tensor:
        expected = head.values(said)
        return expected if masks is None else masks.forbid(expected, obs)

    judging = online
    if noise is not None:
        online, target, judging = map(with_noise, (online, target, online), noise)
    outputs = online(batch.obs)
    with torch.no_grad():
        if munchausen is None:
            after = target(batch.next_obs)
            judge = judging(batch.next_obs) if double else after
            own = not double and masks is None
            returns, likely = head.best(after, values(judge, batch.next_obs), own=own)
            reward = batch.reward
        else:
            before, after = target(torch.cat((batch.obs, batch.next_obs))).chunk(2)
            judge = judging(batch.next_obs) if double else after
            returns, likely = munchausen.returns(after, values(judge, batch.next_obs), head)
            reward = batch.reward + munchausen.bonus(values(before, batch.obs), batch.action)
        goals = reward.unsqueeze(1) + batch.discount.unsqueeze(1) * returns
    chosen = said_of(outputs, batch.action)
    each, td_error = head.loss(chosen, goals, likely)
    metrics = (td_error.abs(), head.values(chosen.detach()))
    return RowLoss(batch.weight * each, metrics, (td_error,))
