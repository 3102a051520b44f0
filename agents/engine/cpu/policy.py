"""Stochastic policies and values as machine code, for those who act on the host."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from steadyrl.agents.engine.cpu.network import (
    OUTPUTS,
    Convolution,
    Floats,
    HostNetwork,
    Layer,
    forward,
)
from steadyrl.agents.networks.actor_critic import (
    ActorCritic,
    SeparateTrunks,
    SharedTrunk,
    TwinLayer,
    TwinTrunk,
)
from steadyrl.agents.networks.distributions import BoxHead, DiscreteHead, GaussianLayer, Head
from steadyrl.agents.networks.encoders import Dense, Scale
from steadyrl.agents.networks.normalizers import CLIP
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.settings import is_large_image
from steadyrl.core.jit import compiled

LIMIT = np.float32(CLIP)
NOTHING: Floats = np.zeros(0, np.float32)


class Drawing(NamedTuple):
    """What compiled code draws actions by; what is not there is empty."""

    plan: NDArray[np.int64]  # of the network
    activation: int
    shift: Floats  # [D] of observations
    scale: Floats  # [D]
    log_std: Floats  # [A] of a Gaussian; without one it is one choice out of many
    half_width: Floats  # [A] of the environment's bounds, where its units are others
    middle: Floats  # [A]


@compiled
def parametrise(drawing: Drawing, obs: Any, parameters: Any) -> None:
    """Write the last layer's output [N, K] for observations [N, D]."""
    if not len(drawing.shift):
        forward(drawing.plan, drawing.activation, obs, parameters)
        return
    x = np.empty(obs.shape, np.float32)
    for n in range(obs.shape[0]):
        for i in range(obs.shape[1]):
            value = (obs[n, i] - drawing.shift[i]) * drawing.scale[i]
            x[n, i] = min(max(value, -LIMIT), LIMIT)
    forward(drawing.plan, drawing.activation, x, parameters)


@compiled
def draw(drawing: Drawing, obs: Any, noise: Any, chosen: Any, sent: Any) -> None:
    """Draw actions [N, A] for observations [N, D]: as `chosen`, and as the environment is sent.

    One out of many is argmax(logit − noise), a Gaussian's is μ + σ·noise
    (`agents/networks/distributions.py`).
    """
    parameters = np.empty((len(obs), drawing.plan[-1, OUTPUTS]), np.float32)
    parametrise(drawing, obs, parameters)
    for n in range(len(obs)):
        if not len(drawing.log_std):
            best = 0
            for k in range(1, parameters.shape[1]):
                if parameters[n, k] - noise[n, k] > parameters[n, best] - noise[n, best]:
                    best = k
            chosen[n, 0] = sent[n, 0] = best
            continue
        for a in range(parameters.shape[1]):
            action = parameters[n, a] + math.exp(drawing.log_std[a]) * noise[n, a]
            chosen[n, a] = sent[n, a] = action
            if len(drawing.middle):
                sent[n, a] = drawing.middle[a] + action * drawing.half_width[a]


@compiled
def choose(drawing: Drawing, obs: Any, sent: Any) -> None:
    """Write the best actions [N, A] for observations [N, D] as the environment is sent them.

    One out of many is the first of those whose output is the largest, a Gaussian's is μ.
    """
    parameters = np.empty((len(obs), drawing.plan[-1, OUTPUTS]), np.float32)
    parametrise(drawing, obs, parameters)
    for n in range(len(obs)):
        if not len(drawing.log_std):
            sent[n, 0] = _first_best(parameters[n])
            continue
        for a in range(parameters.shape[1]):
            sent[n, a] = parameters[n, a]
            if len(drawing.middle):
                sent[n, a] = drawing.middle[a] + parameters[n, a] * drawing.half_width[a]


@compiled
def _first_best(values: Any) -> int:
    best = 0
    for k in range(1, len(values)):
        if values[k] > values[best]:
            best = k
    return best


@compiled
def explore(
    plan: Any, activation: int, obs: Any, coins: Any, choices: Any, epsilon: float, action: Any
) -> None:
    """Write actions [N, 1] for observations [N, D]: one's choice [N] where its coin [N] is below ε.

    Elsewhere it is the first of those whose output is the largest.
    """
    values = np.empty((1, plan[-1, OUTPUTS]), np.float32)
    for n in range(len(obs)):
        if coins[n] < epsilon:
            action[n, 0] = choices[n]
            continue
        forward(plan, activation, obs[n : n + 1], values)
        action[n, 0] = _first_best(values[0])


class HostPolicy:
    """What parametrises the actions of an actor-critic network."""

    def __init__(self, network: ActorCritic, half: HostNetwork) -> None:
        log_std = NOTHING
        if isinstance(network.policy, GaussianLayer):
            log_std = _array(network.policy.log_std)
        self._network = half
        self._drawing = _drawing(network, half)._replace(log_std=log_std)

    def __call__(self, obs: NDArray[Any]) -> Floats:
        """Return parameters [N, P] for observations [N, …]."""
        given = np.ascontiguousarray(obs).reshape(len(obs), -1)
        mean = np.empty((len(obs), self._network.outputs), np.float32)
        parametrise(self._drawing, given, mean)
        log_std = self._drawing.log_std
        if not len(log_std):
            return mean
        return np.concatenate((mean, np.broadcast_to(log_std, mean.shape)), axis=1)

    def drawing(self, head: Head) -> Drawing | None:
        """Return what compiled code draws by; None where actions are of other kinds."""
        if isinstance(head, BoxHead) and head.units is not None:
            half_width, middle = map(_array, head.units)
            return self._drawing._replace(half_width=half_width, middle=middle)
        return self._drawing if type(head) in (BoxHead, DiscreteHead) else None


class HostValue:
    """The value of an actor-critic network: for a few rows a tenth of the time of torch's calls."""

    def __init__(self, network: ActorCritic, half: HostNetwork) -> None:
        self._network = half  # which keeps what the drawing points to
        self._drawing = _drawing(network, half)

    def __call__(self, obs: Tensor) -> Tensor:
        """Return values [N] for observations [N, …]."""
        given = np.ascontiguousarray(obs.numpy()).reshape(len(obs), -1)
        value = np.empty((len(obs), 1), np.float32)
        parametrise(self._drawing, given, value)
        return torch.from_numpy(value[:, 0])


def drawing_of(network: HostNetwork) -> Drawing:
    """Return what compiled code chooses by, where outputs are the worth of actions."""
    return Drawing(network.plan, network.activation, *(NOTHING,) * 5)


def q_on_host(network: QNetwork) -> HostNetwork | None:
    """Return a network whose largest output is the best action, or None where there is none."""
    if network.shape != () or network.masks is not None:  # () is one number for each action
        return None
    # The value of a dueling network is the same for all actions and cannot change the best.
    return _network(network.trunk, network.advantage, network.observation_shape)


def policy_on_host(network: ActorCritic) -> HostPolicy | None:
    """Return the policy as machine code, or None where torch is as fast."""
    policy = network.policy
    half = _half(network, 0, policy.mean if isinstance(policy, GaussianLayer) else policy)
    return None if half is None else HostPolicy(network, half)


def value_on_host(network: ActorCritic) -> HostValue | None:
    """Return the value as machine code, or None likewise."""
    half = _half(network, 1, network.value)
    return None if half is None else HostValue(network, half)


def _half(network: ActorCritic, which: int, last: nn.Module) -> HostNetwork | None:
    """Return what the policy (0) or the value (1) sees by, with what comes last."""
    trunk = network.trunk
    if network.masks is not None:
        return None
    if isinstance(trunk, TwinTrunk):
        hidden = [_one_of_two(layer, which) for layer in trunk.twins] if _is_here(last) else []
        return HostNetwork([*hidden, _layer(last)], trunk.activation) if hidden else None
    if isinstance(trunk, SeparateTrunks):
        return _network((trunk.policy, trunk.value)[which], last, network.observation_shape)
    assert isinstance(trunk, SharedTrunk)
    return _network(trunk.both, last, network.observation_shape)


def _network(trunk: nn.Module, last: nn.Module, shape: tuple[int, ...]) -> HostNetwork | None:
    """Return a trunk for observations of this shape with what comes last."""
    *before, dense = trunk if isinstance(trunk, nn.Sequential) else (trunk,)
    order = [type(part) for part in before if not isinstance(part, Scale)]
    convolutions = [part for part in before if isinstance(part, nn.Conv2d)]
    known = order in ([], [nn.Flatten], [nn.Conv2d, nn.ReLU, nn.Flatten])
    plain = all(_is_plain(part) for part in convolutions)
    if not (known and plain and isinstance(dense, Dense) and _is_here(last)):
        return None
    if is_large_image(shape):
        return None
    boards = [_convolution(part, shape) for part in convolutions]
    norms = dense.norms or [None] * len(dense.layers)
    hidden = [_layer(layer, norm) for layer, norm in zip(dense.layers, norms, strict=True)]
    scaled = any(isinstance(part, Scale) for part in before)
    return HostNetwork([*boards, *hidden, _layer(last)], dense.activation, scaled=scaled)


def _is_plain(layer: nn.Conv2d) -> bool:
    """Tell whether a convolution goes by single places, within the board, over all channels."""
    steps = layer.stride == (1, 1) and layer.dilation == (1, 1)
    return steps and layer.padding in ((0, 0), "valid") and layer.groups == 1


def _is_here(layer: nn.Module) -> bool:
    return all(parameter.is_cpu for parameter in layer.parameters())


def _drawing(network: ActorCritic, half: HostNetwork) -> Drawing:
    n = network.normaliser
    statistics = (NOTHING,) * 2 if n is None else (_flat(n.shift), _flat(n.scale))
    return Drawing(half.plan, half.activation, *statistics, NOTHING, NOTHING, NOTHING)


def _layer(layer: nn.Module, norm: nn.Module | None = None) -> Layer:
    assert isinstance(layer, nn.Linear)
    after = None
    if norm is not None:
        assert isinstance(norm, nn.LayerNorm)
        after = _array(norm.weight), _array(norm.bias)
    return Layer(_array(layer.weight), _array(layer.bias), transposed=True, norm=after)


def _convolution(layer: nn.Conv2d, shape: tuple[int, ...]) -> Convolution:
    assert layer.bias is not None
    _, height, width = shape
    return Convolution(_array(layer.weight), _array(layer.bias), (height, width))


def _one_of_two(layer: TwinLayer, which: int) -> Layer:
    norm = layer.norm
    after = None if norm is None else (_array(norm.weight[which, 0]), _array(norm.bias[which, 0]))
    return Layer(_array(layer.weight[which]), _array(layer.bias[which, 0]), norm=after)


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().numpy()
    return array


def _flat(tensor: Tensor) -> Floats:
    return _array(tensor).reshape(-1)
