"""What is learned about novelty (Burda et al. 2018), and what its rewards are worth.

How new an observation is: how badly a network predicts what a fixed random one says of it,
e(o) = mean (f̂(o) − f(o))². The reward of a row is that of where it led, r_t = e(o_{t+1}).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn

from agents.network_settings import NetworkSettings
from agents.networks import uniform_
from agents.normaliser import ObservationNormaliser
from agents.recipe import RowLoss
from agents.trunks import build_trunk
from memory.compiled import compiled

CLIP = 5.0  # standard deviations: what is far from all that was seen is new enough
METRICS = ("train/rnd_loss", "train/rnd_value_loss")


class NoveltyBatch(NamedTuple):
    """B valid rows, observations as these networks see them."""

    obs: Tensor  # [B, …]
    following: Tensor  # [B, …] what came next, also where an episode ended
    features: Tensor  # [B, K] what the fixed network says of that
    return_: Tensor  # [B]


class Novelty(nn.Module):
    """Predicts features of observations, and the value of the novelty to come; a trunk for each."""

    def __init__(self, shape: Sequence[int], hidden: Sequence[int], network: NetworkSettings):
        super().__init__()
        self.normaliser = ObservationNormaliser(tuple(shape), clip=CLIP)
        # One layer more than what it predicts.
        self.predictor = features(shape, (*hidden, hidden[-1]), network)
        trunk, size = build_trunk(shape, "float32", hidden, "relu", network)
        self.value = nn.Sequential(trunk, nn.Linear(size, 1))

    def forward(self, obs: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Return values [B] of normalised observations, and features [B, K] of those after them."""
        return self.value(obs).squeeze(-1), self.predictor(following)


def features(shape: Sequence[int], hidden: Sequence[int], network: NetworkSettings) -> nn.Module:
    """Build a network from observations to as many features as its last layer is wide.

    Layers are followed by ReLUs whatever the policy's are: tanh says the same of all that is far.
    """
    trunk, size = build_trunk(shape, "float32", hidden, "relu", network)
    return nn.Sequential(trunk, nn.Linear(size, size))


def start_(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise every layer as U(−2/√fan_in, 2/√fan_in), so that ReLUs bend everywhere.

    Without biases a function of few numbers would be guessed far from where it was learned.
    """
    uniform_(module, generator)
    for parameter in module.parameters():
        parameter.data.mul_(2)


def novelty(predicted: Tensor, known: Tensor) -> Tensor:
    """Return mean (f̂ − f)² [B] over the features [B, K]."""
    return F.mse_loss(predicted, known, reduction="none").mean(-1)


def novelty_loss(
    network: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], batch: NoveltyBatch
) -> RowLoss:
    """Return e(o') + (V(o) − R)² of every row [B], and both as metrics."""
    value, predicted = network(batch.obs, batch.following)
    error = novelty(predicted, batch.features)
    squares = F.mse_loss(value, batch.return_, reduction="none")
    return RowLoss(error + squares, (error, squares))


@compiled
def endless_advantages(  # type: ignore[no-untyped-def]
    reward, value, valid, gamma, gae_lambda, advantage
):
    """Write A_t = δ_t + γλA_t', δ_t = r_t + γV(o_t') − V(o_t) [T, N], t' being the next valid row.

    What is new stays new when an episode ends: neither termination nor truncation ends a return,
    the row that resets is left out, and what follows is the next episode's first observation.
    """
    steps, envs = reward.shape
    for env in range(envs):
        following, worth = 0.0, value[steps, env]
        for t in range(steps - 1, -1, -1):
            if not valid[t, env]:
                advantage[t, env] = 0.0
                continue
            delta = reward[t, env] + gamma * worth - value[t, env]
            following = delta + gamma * gae_lambda * following
            advantage[t, env] = following
            worth = value[t, env]
