"""Policy and value in one network: with one trunk for both, or one each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from agents.compiling import being_traced
from agents.heads import GaussianLayer, Head
from agents.networks import build_trunk, orthogonal_
from agents.normaliser import ObservationNormaliser
from agents.ppo_settings import PPOSettings
from envs.types import EnvSpec


class FastTanh(torch.autograd.Function):
    """tanh(x) = 2σ(2x) − 1 with its derivative 1 − y² as one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return y = tanh(x)."""
        y = tanh_by_sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        """Return (1 − y²) · gradient."""
        slope: Tensor = torch.ops.aten.tanh_backward(gradient[0], ctx.saved_tensors[0])
        return slope


def tanh_by_sigmoid(x: Tensor) -> Tensor:
    """Return 2σ(2x) − 1, with one allocation."""
    y = torch.add(x, x).sigmoid_()
    return y.add_(y).sub_(1)


def tanh(x: Tensor) -> Tensor:
    """Return tanh(x), to 2e-7.

    PyTorch's tanh takes half of a small network's time on a CPU; its sigmoid is six times as fast.
    """
    if x.is_cuda:
        return torch.tanh(x)
    if being_traced():
        return 2 * torch.sigmoid(2 * x) - 1
    if x.requires_grad:
        y: Tensor = FastTanh.apply(x)  # type: ignore[no-untyped-call]
        return y
    return tanh_by_sigmoid(x)


class Tanh(nn.Module):
    """The function `tanh` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tanh(x)."""
        return tanh(x)


ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU}


class TwinLayer(nn.Module):
    """Two layers of one size as one batched product: [2, B, in] to [2, B, out]."""

    def __init__(self, inputs: int, outputs: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(2, 1, outputs))
        self._activation = activation().forward

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x W + b) for both."""
        y: Tensor = self._activation(torch.baddbmm(self.bias, x, self.weight))
        return y

    def orthogonal_(self, gain: float, generator: torch.Generator) -> None:
        """Initialise both orthogonally with zero biases."""
        for weight in self.weight:
            nn.init.orthogonal_(weight, gain, generator=generator)
        nn.init.zeros_(self.bias)


class TwinTrunk(nn.Module):
    """Two MLPs side by side: half the kernels of two separate ones."""

    def __init__(self, inputs: int, hidden: Sequence[int], activation: type[nn.Module]) -> None:
        super().__init__()
        sizes = pairwise((inputs, *hidden))
        self.twins = [TwinLayer(a, b, activation) for a, b in sizes]
        self.layers = nn.Sequential(*self.twins)
        self.activation = activation

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [B, F] for the policy and for the value."""
        x = obs.flatten(1)
        for_policy, for_value = self.layers(x.expand(2, *x.shape)).unbind(0)
        return for_policy, for_value


class SeparateTrunks(nn.Module):
    """Two trunks that share nothing."""

    def __init__(self, policy: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value = value

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [B, F] for the policy and for the value."""
        return self.policy(obs), self.value(obs)


class SharedTrunk(nn.Module):
    """One trunk for both."""

    def __init__(self, both: nn.Module) -> None:
        super().__init__()
        self.both = both

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [B, F], twice."""
        features = self.both(obs)
        return features, features


class ActorCritic(nn.Module):
    """Normalised observations, trunk or trunks, and two heads."""

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        dtype: str,
        head: Head,
        *,
        hidden: Sequence[int],
        activation: str,
        shared: bool | None,
        normalise: bool,
        log_std: float,
    ) -> None:
        super().__init__()
        kind = ACTIVATIONS[activation]
        trunk, features = build_trunk(observation_shape, dtype, hidden, kind)
        image = len(observation_shape) == 3
        if image if shared is None else shared:
            self.trunk: nn.Module = SharedTrunk(trunk)
        elif image:
            second, _ = build_trunk(observation_shape, dtype, hidden, kind)
            self.trunk = SeparateTrunks(trunk, second)
        else:
            self.trunk = TwinTrunk(math.prod(observation_shape), hidden, kind)
        self.normaliser = ObservationNormaliser(observation_shape) if normalise else None
        self.policy = head.layer(features, log_std)
        self.value = nn.Linear(features, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the policy's parameters [B, P] and the values [B]."""
        x = obs if self.normaliser is None else self.normaliser(obs)
        for_policy, for_value = self.trunk(x)
        return self.policy(for_policy), self.value(for_value).squeeze(-1)

    def deciding(self, obs: Tensor) -> Tensor:
        """Return the policy's parameters [B, P] alone."""
        x = obs if self.normaliser is None else self.normaliser(obs)
        parameters: Tensor = self.policy(self.trunk(x)[0])
        return parameters

    def start_(self, generator: torch.Generator) -> None:
        """Initialise with gain √2 in the trunks, .01 for the policy and 1 for the value."""
        orthogonal_(self.trunk, math.sqrt(2), generator)
        for layer in self.trunk.modules():
            if isinstance(layer, TwinLayer):
                layer.orthogonal_(math.sqrt(2), generator)
        orthogonal_(self.policy, 0.01, generator)
        orthogonal_(self.value, 1.0, generator)
        for part in (self.policy, self.normaliser):
            if isinstance(part, GaussianLayer | ObservationNormaliser):
                part.start_()


def build_network(settings: PPOSettings, spec: EnvSpec, head: Head) -> ActorCritic:
    """Build the network without its memory."""
    with torch.device("meta"):
        return ActorCritic(
            spec.observation_shape,
            spec.dtype,
            head,
            hidden=settings.hidden,
            activation=settings.activation,
            shared=settings.shared_trunk,
            normalise=settings.normalize_obs,
            log_std=settings.log_std_init,
        )
