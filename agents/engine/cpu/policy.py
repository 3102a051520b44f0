"""Policies and values as compiled code on the host."""

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
    ParallelLinear,
    ParallelMLP,
    SeparateTrunks,
    SharedTrunk,
)
from steadyrl.agents.networks.distributions import BoxHead, DiscreteHead, GaussianLayer, Head
from steadyrl.agents.networks.encoders import MLP, PixelScale
from steadyrl.agents.networks.normalizers import CLIP
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.settings import is_large_image
from steadyrl.core.gates.numba_private import NUMBA
from steadyrl.core.gates.reference import reference_only
from steadyrl.core.jit import jit

LIMIT = np.float32(CLIP)
NOTHING: Floats = np.zeros(0, np.float32)


class PolicyArrays(NamedTuple):
    """Inputs of compiled action selection; absent parts are empty."""

    layer_table: NDArray[np.int64]  # see network.py
    activation: int
    mean: Floats  # [D] of the observation normaliser
    inv_std: Floats  # [D]
    log_std: Floats  # [A] of a Gaussian; empty: one discrete action
    scale: Floats  # [A] to the environment's units; empty: identity
    bias: Floats  # [A]


@jit
def policy_parameters(policy_arrays: PolicyArrays, obs: Any, parameters: Any) -> None:
    """Write the policy's parameters [N, K] for observations [N, D]."""
    if not len(policy_arrays.mean):
        forward(policy_arrays.layer_table, policy_arrays.activation, obs, parameters)
        return
    x = np.empty(obs.shape, np.float32)
    for n in range(obs.shape[0]):
        for i in range(obs.shape[1]):
            value = (obs[n, i] - policy_arrays.mean[i]) * policy_arrays.inv_std[i]
            x[n, i] = min(max(value, -LIMIT), LIMIT)
    forward(policy_arrays.layer_table, policy_arrays.activation, x, parameters)


@jit
def sample_actions(
    policy_arrays: PolicyArrays, obs: Any, noise: Any, chosen: Any, sent: Any
) -> None:
    """Sample raw (`chosen`) and environment (`sent`) actions [N, A] for observations [N, D].

    A discrete action is argmax(logit − noise), a Gaussian one μ + σ·noise
    (`agents/networks/distributions.py`).
    """
    parameters = np.empty((len(obs), policy_arrays.layer_table[-1, OUTPUTS]), np.float32)
    policy_parameters(policy_arrays, obs, parameters)
    for n in range(len(obs)):
        if not len(policy_arrays.log_std):
            best = 0
            for k in range(1, parameters.shape[1]):
                if parameters[n, k] - noise[n, k] > parameters[n, best] - noise[n, best]:
                    best = k
            chosen[n, 0] = sent[n, 0] = best
            continue
        for a in range(parameters.shape[1]):
            action = parameters[n, a] + math.exp(policy_arrays.log_std[a]) * noise[n, a]
            chosen[n, a] = sent[n, a] = action
            if len(policy_arrays.bias):
                sent[n, a] = policy_arrays.bias[a] + action * policy_arrays.scale[a]


@jit
def greedy_actions(policy_arrays: PolicyArrays, obs: Any, sent: Any) -> None:
    """Write the greedy environment actions [N, A] for observations [N, D].

    A discrete action is the first maximum of the outputs, a Gaussian one is μ.
    """
    parameters = np.empty((len(obs), policy_arrays.layer_table[-1, OUTPUTS]), np.float32)
    policy_parameters(policy_arrays, obs, parameters)
    for n in range(len(obs)):
        if not len(policy_arrays.log_std):
            sent[n, 0] = _first_best(parameters[n])
            continue
        for a in range(parameters.shape[1]):
            sent[n, a] = parameters[n, a]
            if len(policy_arrays.bias):
                sent[n, a] = policy_arrays.bias[a] + parameters[n, a] * policy_arrays.scale[a]


@jit
def _first_best(values: Any) -> int:
    best = 0
    for k in range(1, len(values)):
        if values[k] > values[best]:
            best = k
    return best


@jit
def epsilon_greedy_actions(
    layer_table: Any,
    activation: int,
    obs: Any,
    uniforms: Any,
    random_actions: Any,
    epsilon: float,
    action: Any,
) -> None:
    """Write ε-greedy actions [N, 1] for observations [N, D]: random where uniforms [N] < ε."""
    values = np.empty((1, layer_table[-1, OUTPUTS]), np.float32)
    for n in range(len(obs)):
        if uniforms[n] < epsilon:
            action[n, 0] = random_actions[n]
            continue
        forward(layer_table, activation, obs[n : n + 1], values)
        action[n, 0] = _first_best(values[0])


class HostPolicy:
    """The policy of an actor-critic as compiled code."""

    def __init__(self, network: ActorCritic, branch: HostNetwork) -> None:
        log_std = NOTHING
        if isinstance(network.policy, GaussianLayer):
            log_std = _array(network.policy.log_std)
        self._network = branch
        self._policy_arrays = _policy_arrays(network, branch)._replace(log_std=log_std)

    def __call__(self, obs: NDArray[Any]) -> Floats:
        """Return policy parameters [N, P] for observations [N, …]."""
        given = np.ascontiguousarray(obs).reshape(len(obs), -1)
        mean = np.empty((len(obs), self._network.outputs), np.float32)
        policy_parameters(self._policy_arrays, given, mean)
        log_std = self._policy_arrays.log_std
        if not len(log_std):
            return mean
        return np.concatenate((mean, np.broadcast_to(log_std, mean.shape)), axis=1)

    def policy_arrays(self, head: Head) -> PolicyArrays | None:
        """Return the inputs of compiled sampling, or None for unsupported actions."""
        if isinstance(head, BoxHead) and head.affine is not None:
            scale, bias = map(_array, head.affine)
            return self._policy_arrays._replace(scale=scale, bias=bias)
        return self._policy_arrays if type(head) in (BoxHead, DiscreteHead) else None


class HostValue:
    """The value of an actor-critic as compiled code: a tenth of torch's time for few rows."""

    def __init__(self, network: ActorCritic, branch: HostNetwork) -> None:
        self._network = branch  # keeps the arrays alive
        self._policy_arrays = _policy_arrays(network, branch)

    def __call__(self, obs: Tensor) -> Tensor:
        """Return values [N] for observations [N, …]."""
        given = np.ascontiguousarray(obs.numpy()).reshape(len(obs), -1)
        value = np.empty((len(obs), 1), np.float32)
        policy_parameters(self._policy_arrays, given, value)
        return torch.from_numpy(value[:, 0])


def q_policy_arrays(network: HostNetwork) -> PolicyArrays:
    """Return the inputs of compiled greedy selection by Q-values."""
    return PolicyArrays(network.layer_table, network.activation, *(NOTHING,) * 5)


def acts_in_machine_code() -> bool:
    """Return whether small networks on the host act as Numba's code, and play fused rollouts."""
    return not reference_only() and NUMBA.offers("products")


def policy_in_machine_code(network: nn.Module) -> HostNetwork | HostPolicy | None:
    """Return Q-values up to their argmax, or a policy; None where torch is as fast."""
    if type(network) is QNetwork:  # a subclass may have other layers
        return q_on_host(network)
    return policy_on_host(network) if isinstance(network, ActorCritic) else None


def q_on_host(network: QNetwork) -> HostNetwork | None:
    """Return a host network whose largest output is the greedy action, or None."""
    scalar = network.shape == ()
    if not scalar or network.masks is not None or not acts_in_machine_code():
        return None
    # The value stream of a dueling network does not change the argmax.
    return _network(network.trunk, network.advantage, network.observation_shape)


def policy_on_host(network: ActorCritic) -> HostPolicy | None:
    """Return the policy as compiled code, or None where torch is as fast."""
    if type(network) is not ActorCritic:  # a subclass may have other layers
        return None
    policy = network.policy
    branch = _branch(network, 0, policy.mean if isinstance(policy, GaussianLayer) else policy)
    return None if branch is None else HostPolicy(network, branch)


def value_on_host(network: ActorCritic) -> HostValue | None:
    """Return the value as compiled code, or None where torch is as fast."""
    branch = _branch(network, 1, network.value)
    return None if branch is None else HostValue(network, branch)


def _branch(network: ActorCritic, which: int, last: nn.Module) -> HostNetwork | None:
    """Return the trunk and head of the policy (0) or the value (1)."""
    trunk = network.trunk
    if network.masks is not None or not acts_in_machine_code():
        return None
    if isinstance(trunk, ParallelMLP):
        hidden = (
            [_parallel_branch(layer, which) for layer in trunk.parallel_layers]
            if _is_on_cpu(last)
            else []
        )
        return HostNetwork([*hidden, _layer(last)], trunk.activation) if hidden else None
    if isinstance(trunk, SeparateTrunks):
        return _network((trunk.policy, trunk.value)[which], last, network.observation_shape)
    assert isinstance(trunk, SharedTrunk)
    return _network(trunk.both, last, network.observation_shape)


def _network(trunk: nn.Module, last: nn.Module, shape: tuple[int, ...]) -> HostNetwork | None:
    """Return a host network of a trunk for observations of this shape and a last layer."""
    *before, dense = trunk if isinstance(trunk, nn.Sequential) else (trunk,)
    order = [type(part) for part in before if not isinstance(part, PixelScale)]
    convolutions = [part for part in before if isinstance(part, nn.Conv2d)]
    known = order in ([], [nn.Flatten], [nn.Conv2d, nn.ReLU, nn.Flatten])
    plain = all(_is_plain(part) for part in convolutions)
    if not (known and plain and isinstance(dense, MLP) and _is_on_cpu(last)):
        return None
    if is_large_image(shape):
        return None
    boards = [_convolution(part, shape) for part in convolutions]
    norms = dense.norms or [None] * len(dense.layers)
    hidden = [_layer(layer, norm) for layer, norm in zip(dense.layers, norms, strict=True)]
    scaled = any(isinstance(part, PixelScale) for part in before)
    return HostNetwork([*boards, *hidden, _layer(last)], dense.activation, scaled=scaled)


def _is_plain(layer: nn.Conv2d) -> bool:
    """Return whether a convolution has stride 1, no dilation, no padding and one group."""
    steps = layer.stride == (1, 1) and layer.dilation == (1, 1)
    return steps and layer.padding in ((0, 0), "valid") and layer.groups == 1


def _is_on_cpu(layer: nn.Module) -> bool:
    return all(parameter.is_cpu for parameter in layer.parameters())


def _policy_arrays(network: ActorCritic, branch: HostNetwork) -> PolicyArrays:
    n = network.normaliser
    statistics = (NOTHING,) * 2 if n is None else (_flat(n.frozen_mean), _flat(n.inv_std))
    return PolicyArrays(
        branch.layer_table, branch.activation, *statistics, NOTHING, NOTHING, NOTHING
    )


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


def _parallel_branch(layer: ParallelLinear, which: int) -> Layer:
    norm = layer.norm
    after = None if norm is None else (_array(norm.weight[which, 0]), _array(norm.bias[which, 0]))
    return Layer(_array(layer.weight[which]), _array(layer.bias[which, 0]), norm=after)


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().numpy()
    return array


def _flat(tensor: Tensor) -> Floats:
    return _array(tensor).reshape(-1)
