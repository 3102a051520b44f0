"""Actor-critic networks, with a shared trunk or one for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.activations import ACTIVATIONS
from steadyrl.agents.networks.distributions import GaussianLayer, Head
from steadyrl.agents.networks.encoders import build_trunk
from steadyrl.agents.networks.hidden import matrices_after_first
from steadyrl.agents.networks.init import orthogonal_, uniform_
from steadyrl.agents.networks.normalizers import ObservationNormaliser, PopArt
from steadyrl.agents.networks.settings import PLAIN, Activation, Init, NetworkSettings


class ParallelLinear(nn.Module):
    """Two linear layers of one size as one batched product: [2, B, in] to [2, B, out]."""

    def __init__(
        self, inputs: int, outputs: int, activation: Activation, *, layer_norm: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(2, 1, outputs))
        self.norm = ParallelLayerNorm(outputs) if layer_norm else None
        self._activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x W + b) of both."""
        y = torch.baddbmm(self.bias, x, self.weight)
        if self.norm is not None:
            y = self.norm(y)
        activated: Tensor = self._activation(y)
        return activated

    def reset_parameters(self, generator: torch.Generator, init: Init) -> None:
        """Initialise both: orthogonally with gain √2 and zero biases, or uniformly."""
        if init == "uniform":
            bound = 1 / math.sqrt(self.weight.shape[1])
            for parameter in (self.weight, self.bias):
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
        else:
            for weight in self.weight:
                nn.init.orthogonal_(weight, math.sqrt(2), generator=generator)
            nn.init.zeros_(self.bias)
        if self.norm is not None:
            nn.init.ones_(self.norm.weight)
            nn.init.zeros_(self.norm.bias)


class ParallelLayerNorm(nn.Module):
    """Two layer norms side by side."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self._shape = (features,)  # of `x`, it is no constant in a trace, which ONNX needs
        self.weight = nn.Parameter(torch.empty(2, 1, features))
        self.bias = nn.Parameter(torch.empty(2, 1, features))

    def forward(self, x: Tensor) -> Tensor:
        """Return both normalised inputs [2, B, F], each with its own scale and bias."""
        return torch.addcmul(self.bias, F.layer_norm(x, self._shape), self.weight)


class ParallelMLP(nn.Module):
    """Two MLPs side by side: half as many kernels as two separate ones."""

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        activation: Activation,
        *,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = pairwise((inputs, *hidden))
        self.parallel_layers = [
            ParallelLinear(a, b, activation, layer_norm=layer_norm) for a, b in sizes
        ]
        self.layers = nn.Sequential(*self.parallel_layers)
        self.activation: Activation = activation

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, F] for the policy and for the value."""
        x = obs.flatten(1)
        for_policy, for_value = self.layers(x.expand(2, *x.shape)).unbind(0)
        return for_policy, for_value


class SeparateTrunks(nn.Module):
    """Two separate trunks."""

    def __init__(self, policy: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value = value

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, F] for the policy and for the value."""
        return self.policy(obs), self.value(obs)


class SharedTrunk(nn.Module):
    """One trunk for policy and value."""

    def __init__(self, both: nn.Module) -> None:
        super().__init__()
        self.both = both

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same features [B, F] for both."""
        features = self.both(obs)
        return features, features


class ActorCritic(nn.Module):
    """Observation normaliser, one or two trunks, policy and value heads."""

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        dtype: str,
        head: Head,
        *,
        hidden: Sequence[int],
        shared: bool | None,
        normalise: bool,
        log_std: float | None,
        network: NetworkSettings = PLAIN,
        masks: Masks | None = None,
        popart: bool = False,
    ) -> None:
        super().__init__()
        self.observation_shape = observation_shape
        trunk, features = build_trunk(observation_shape, dtype, hidden, network)
        image = len(observation_shape) == 3
        if image if shared is None else shared:
            self.trunk: nn.Module = SharedTrunk(trunk)
        elif image or network.encoder_for(observation_shape) != "mlp":
            second, _ = build_trunk(observation_shape, dtype, hidden, network)
            self.trunk = SeparateTrunks(trunk, second)
        else:
            inputs, norm = math.prod(observation_shape), network.layer_norm
            self.trunk = ParallelMLP(inputs, hidden, network.activation, layer_norm=norm)
        self.masks = masks  # `observation_shape` is without them
        self.normaliser = ObservationNormaliser(observation_shape, masks) if normalise else None
        self.policy = head.layer(features, log_std)
        self.value = nn.Linear(features, 1)
        self.popart = PopArt() if popart else None

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return policy parameters [B, P] and values [B], in PopArt's units if it is used."""
        for_policy, for_value = self.trunk(self.preprocess(obs))
        return self.allowed(self.policy(for_policy), obs), self.value(for_value).squeeze(-1)

    def policy_params(self, obs: Tensor) -> Tensor:
        """Return policy parameters [B, P] only."""
        return self.allowed(self.policy(self.trunk(self.preprocess(obs))[0]), obs)

    def allowed(self, parameters: Tensor, obs: Tensor) -> Tensor:
        """Return policy parameters [B, P] with forbidden actions masked."""
        return parameters if self.masks is None else self.masks.forbid(parameters, obs)

    def preprocess(self, obs: Tensor) -> Tensor:
        """Return the trunk's input for observations [B, …]: normalised, without masks."""
        x = obs if self.normaliser is None else self.normaliser(obs)
        return x if self.masks is None else self.masks.features(x)

    def hidden_matrices(self) -> dict[str, int]:
        """Return the names of weights between hidden layers, with the matrices in each."""
        two = isinstance(self.trunk, SeparateTrunks)
        trunks = ("trunk.policy", "trunk.value") if two else ("trunk",)
        return matrices_after_first(self, *trunks, kinds=(nn.Linear, nn.Conv2d, ParallelLinear))

    def reset_parameters(self, generator: torch.Generator, init: Init = "auto") -> None:
        """Initialise orthogonally, gains √2 (trunks), 0.01 (policy), 1 (value), or uniformly."""
        if init == "uniform":
            uniform_(self, generator)
        else:
            orthogonal_(self.trunk, math.sqrt(2), generator)
        for layer in self.trunk.modules():
            if isinstance(layer, ParallelLinear):
                layer.reset_parameters(generator, init)
        if init != "uniform":
            orthogonal_(self.policy, 0.01, generator)
            orthogonal_(self.value, 1.0, generator)
        for part in (self.policy, self.normaliser, self.popart):
            if isinstance(part, GaussianLayer | ObservationNormaliser | PopArt):
                part.reset_parameters()
