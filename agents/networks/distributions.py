"""Action distributions: sampling, log-probability and entropy as a few tensor operations.

A head reads `parameters` [B, size], the output of the policy's last layer. Randomness is passed
in as `noise`, so that everything else is a pure function that can be compiled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn

from steadyrl.core.saved_state import FINITE, Limits
from steadyrl.envs.types import ActionSpec, BoxActions, DiscreteActions, MultiDiscreteActions

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Head(ABC):
    """The distribution of one kind of action."""

    size: int  # length of `parameters`
    noise_shape: tuple[int, ...]
    action_shape: tuple[int, ...]
    action_dtype = torch.int64

    def layer(self, features: int, log_std: float | None) -> nn.Module:
        """Build the policy's last layer; `log_std` initialises log σ, if there is one."""
        del log_std
        return nn.Linear(features, self.size)

    @abstractmethod
    def draw_(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Fill `noise` [..., *noise_shape] with the randomness that `sample` needs."""

    @abstractmethod
    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return actions [B, *action_shape]."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability of `action` [B]."""
        return self.evaluate(parameters, action)[0]

    @abstractmethod
    def greedy(self, parameters: Tensor) -> Tensor:
        """Return the modes [B, *action_shape]."""

    def to_env(self, action: Tensor) -> Tensor:
        """Return actions in the environment's units."""
        return action

    @abstractmethod
    def evaluate(self, parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action` [B] and the entropy [B]."""


class DiscreteHead(Head):
    """One of n actions: softmax of n logits."""

    def __init__(self, n: int) -> None:
        self.size = n
        self.noise_shape = (n,)
        self.action_shape = ()

    def _logits(self, parameters: Tensor) -> Tensor:
        return parameters

    def draw_(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Draw log E, E ~ Exp(1)."""
        return noise.exponential_(generator=generator).log_()

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return argmax(logit − log E), distributed as softmax(logit) (Gumbel-max)."""
        return (self._logits(parameters) - noise).argmax(-1)

    def greedy(self, parameters: Tensor) -> Tensor:
        """Return the action with the largest logit."""
        return self._logits(parameters).argmax(-1)

    def evaluate(self, parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(a) and −Σ p log p."""
        log_p = F.log_softmax(parameters, -1)  # [B, n]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy


def action_limits(head: Head) -> Limits:
    """Return the valid range of raw actions."""
    if isinstance(head, MultiBinaryHead):
        return Limits(0, 1)
    if isinstance(head, DiscreteHead):
        return Limits(0, head.noise_shape[-1] - 1)
    return FINITE


class MultiDiscreteHead(DiscreteHead):
    """C independent choices, padded to the widest so that all are one softmax [B, C, K]."""

    def __init__(self, nvec: tuple[int, ...], device: torch.device) -> None:
        self.size = len(nvec) * max(nvec)
        self.noise_shape = (len(nvec), max(nvec))
        self.action_shape = (len(nvec),)
        outside = torch.arange(max(nvec)) >= torch.tensor(nvec).unsqueeze(1)  # [C, K]
        # So negative that p is exactly 0, and finite, so that p · log p is 0 too.
        self._penalty = (outside.float() * -1e9).to(device)

    def _logits(self, parameters: Tensor) -> Tensor:
        return parameters.view(-1, *self.noise_shape) + self._penalty

    def evaluate(self, parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ log p(a) and −ΣΣ p log p."""
        log_p = F.log_softmax(self._logits(parameters), -1)  # [B, C, K]
        entropy = -(log_p.exp() * log_p).sum((-2, -1))
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1).sum(-1), entropy


class MultiBinaryHead(Head):
    """n independent Bernoulli variables: sigmoid of n logits."""

    action_dtype = torch.int8

    def __init__(self, n: int) -> None:
        self.size = n
        self.noise_shape = self.action_shape = (n,)

    def draw_(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Draw u ~ U[0, 1)."""
        return noise.uniform_(generator=generator)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return 1 where u < p."""
        return (noise < parameters.sigmoid()).to(torch.int8)

    def greedy(self, parameters: Tensor) -> Tensor:
        """Return 1 where p > ½."""
        return (parameters > 0).to(torch.int8)

    def evaluate(self, parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ (a·x − softplus(x)) and Σ (softplus(x) − x·p) for logits x."""
        softplus = F.softplus(parameters)
        entropy = (softplus - parameters * parameters.sigmoid()).sum(-1)
        return (action * parameters - softplus).sum(-1), entropy


class GaussianLayer(nn.Module):
    """Means from features and state-independent log σ: [B, features] to [B, 2·size]."""

    def __init__(self, features: int, size: int, log_std: float) -> None:
        super().__init__()
        self.mean = nn.Linear(features, size)
        self.log_std = nn.Parameter(torch.empty(size))
        self._start = log_std

    def forward(self, features: Tensor) -> Tensor:
        """Return means and log σ, concatenated."""
        mean = self.mean(features)
        return torch.cat((mean, self.log_std.expand_as(mean)), -1)

    def reset_parameters(self) -> None:
        """Set log σ to its initial value."""
        nn.init.constant_(self.log_std, self._start)


class BoxHead(Head):
    """A diagonal Gaussian; actions are clipped by the environment, not by the policy."""

    action_dtype = torch.float32

    def __init__(self, size: int, affine: tuple[Tensor, Tensor] | None = None) -> None:
        self.size = 2 * size
        self.noise_shape = self.action_shape = (size,)
        self.affine = affine  # scale and bias to the environment's units, [size] each

    def layer(self, features: int, log_std: float | None) -> nn.Module:
        """Build a layer with state-independent log σ.

        By default σ = √(3/d), at most 1: noise in d dimensions is at most as long as in three. With
        σ = 1 in each of eight, hardly an action is within its bounds.
        """
        size = self.size // 2
        if log_std is None:
            log_std = min(0.0, 0.5 * math.log(3 / size))
        return GaussianLayer(features, size, log_std)

    def draw_(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Draw z ~ N(0, 1)."""
        return noise.normal_(generator=generator)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return μ + σz."""
        mean, log_std = parameters.chunk(2, -1)
        return mean + log_std.exp() * noise

    def to_env(self, action: Tensor) -> Tensor:
        """Return actions rescaled to the environment's bounds."""
        if self.affine is None:
            return action
        scale, bias = self.affine
        return torch.addcmul(bias, action, scale)

    def from_env(self, env_action: Tensor) -> Tensor:
        """Return the raw actions of environment actions."""
        if self.affine is None:
            return env_action
        scale, bias = self.affine
        return (env_action - bias) / scale

    def greedy(self, parameters: Tensor) -> Tensor:
        """Return the means."""
        return parameters.chunk(2, -1)[0]

    def evaluate(self, parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log N(a; μ, σ) of the unclipped action and Σ (log σ + ½ log 2πe)."""
        mean, log_std = parameters.chunk(2, -1)
        z = (action - mean) * (-log_std).exp()
        log_prob = -(0.5 * z.square() + log_std + HALF_LOG_2PI).sum(-1)
        return log_prob, (log_std + (0.5 + HALF_LOG_2PI)).sum(-1)


def action_affine(space: BoxActions, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return scale and bias that map [−1, 1] to the bounds of a Box; None for the identity.

    Unbounded dimensions keep scale 1 and bias 0, or the bound next to 0 where 0 is outside: else
    all actions would be clipped to it.
    """
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (space.low, space.high))
    # Bounds at float32's largest numbers mean unbounded.
    finite = (high - low) < torch.finfo(torch.float32).max
    scale = torch.where(finite, (high - low) / 2, 1.0).float()
    scale[scale == 0] = 1.0  # low = high: every action is clipped to it
    nearest = torch.zeros_like(low).clamp(low, high)
    bias = torch.where(finite, (high + low) / 2, nearest).float()
    same = bool((scale == 1).all()) and bool((bias == 0).all())
    return None if same else (scale.to(device), bias.to(device))


def build_head(action: ActionSpec, device: torch.device, *, scaled: bool = True) -> Head:
    """Return the head for an action space; `scaled`: finite bounds are [−1, 1] to the policy."""
    if isinstance(action, DiscreteActions):
        return DiscreteHead(action.n)
    if isinstance(action, MultiDiscreteActions):
        return MultiDiscreteHead(action.nvec, device)
    if isinstance(action, BoxActions):
        return BoxHead(len(action.low), action_affine(action, device) if scaled else None)
    return MultiBinaryHead(action.n)
