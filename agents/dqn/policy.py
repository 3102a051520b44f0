"""DQN's policy: network, greedy actor and behaviour actor. A trained one needs nothing else.

Imports no compiler: machine code comes with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedyActor
from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.actors.noisy import NoisyNetActor
from steadyrl.agents.base import Actor
from steadyrl.agents.dqn.q_heads import CategoricalHead, QHead, QuantileHead, ScalarHead
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.engine.eager import IN_TORCH
from steadyrl.agents.engine.engine import Engine
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.init import materialize, on_meta
from steadyrl.agents.networks.noisy import NoisyLinear
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.envs.types import DiscreteActions, EnvSpec

if TYPE_CHECKING:
    from steadyrl.agents.engine.cpu.host_weights import HostWeights

HOST = torch.device("cpu")


def build_policy(
    settings: DQNSettings, spec: EnvSpec, device: torch.device, engine: Engine = IN_TORCH
) -> tuple[QNetwork, GreedyActor]:
    """Return a network with uninitialised weights, and its greedy actor."""
    network = materialize(build_network(settings, spec, device), device)
    return network, build_greedy_actor(settings, network, device, engine)


def build_sampling_policy(
    settings: DQNSettings,
    spec: EnvSpec,
    device: torch.device,
    engine: Engine = IN_TORCH,
    *,
    num_envs: int,
    seed: int,
) -> tuple[QNetwork, Actor]:
    """Return the same network with an actor that explores as at the end of training."""
    network, best = build_policy(settings, spec, device, engine)
    return network, behaviour_actor(best, network, spec, lambda: settings.epsilon_end, seed)


def build_head(settings: DQNSettings, device: torch.device = HOST) -> QHead:
    """Build the Q-head: scalar, C51 or quantiles."""
    returns = settings.distribution
    if returns.kind == "c51":
        return CategoricalHead(returns.atoms, returns.v_min, returns.v_max, device)
    if returns.kind == "quantile":
        return QuantileHead(returns.atoms, device)
    return ScalarHead(huber=settings.loss == "huber")


def build_network(settings: DQNSettings, spec: EnvSpec, device: torch.device = HOST) -> QNetwork:
    """Build the Q-network on the meta device, without memory."""
    assert isinstance(spec.action, DiscreteActions)
    noisy, head = partial(NoisyLinear, sigma=settings.noisy.sigma), build_head(settings)
    with on_meta():
        return head.network(
            spec.unmasked_shape,
            spec.dtype,
            spec.action.n,
            settings.hidden,
            settings.dueling,
            head.shape,
            network=settings.network,
            linear=noisy if settings.noisy.enabled else nn.Linear,
            masks=Masks.of(spec, device),
        )


def build_greedy_actor(
    settings: DQNSettings,
    network: QNetwork,
    device: torch.device,
    engine: Engine,
    host_weights: HostWeights | None = None,
) -> GreedyActor:
    """Build an actor that takes the actions with the highest expected return."""
    head, masks = build_head(settings, device), network.masks
    if masks is None:
        read: Any = network if host_weights is None else host_weights.module
        sync_weights = None if host_weights is None else host_weights.sync_weights
        on_host, best = engine.policy(read), lambda q: head.values(q).argmax(1)
        policy_arrays = None
        if on_host is not None:
            from steadyrl.agents.engine.cpu.policy import q_policy_arrays  # imports Numba

            policy_arrays = q_policy_arrays(on_host)
        return GreedyActor(
            network,
            on_host,
            device,
            best,
            sync_weights,
            cuda_graph=engine.captures,
            policy_arrays=policy_arrays,
        )

    def allowed(obs: Tensor, *noise: Tensor) -> Tensor:
        return masks.forbid(head.values(network(obs, *noise)), obs)

    return GreedyActor(allowed, None, device, lambda q: q.argmax(1))


def behaviour_actor(
    best: GreedyActor, network: QNetwork, spec: EnvSpec, epsilon: Callable[[], float], seed: int
) -> Actor:
    """Return the behaviour actor: ε-greedy, or greedy with noisy weights."""
    assert isinstance(spec.action, DiscreteActions)
    if network.is_noisy:
        return NoisyNetActor(best, noise_size=network.noise_size, seed=seed)
    masks = Masks.of(spec, HOST)
    return EpsilonGreedyActor(best, actions=spec.action.n, epsilon=epsilon, seed=seed, masks=masks)
