"""DQN's policy: network, greedy actor and behaviour actor. A trained one needs nothing else.

Imports no compiler: machine code comes with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedyActor
from steadyrl.agents.actors.greedy import GreedyActor, greedy_q_actor
from steadyrl.agents.actors.noisy import NoisyNetActor
from steadyrl.agents.base import Actor
from steadyrl.agents.dqn.q_heads import CategoricalHead, QHead, QuantileHead, ScalarHead
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.engine.eager import REFERENCE
from steadyrl.agents.engine.engine import Engine
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.init import materialize, on_meta
from steadyrl.agents.networks.noisy import NoisyLinear
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.buffers.memory_layout import HOST
from steadyrl.envs.types import DiscreteActions, EnvSpec

if TYPE_CHECKING:
    from steadyrl.agents.engine.cpu.host_weights import HostWeights


def build_q_head(settings: DQNSettings, device: torch.device = HOST) -> QHead:
    """Build the Q-head: scalar, C51 or quantiles."""
    returns = settings.distribution
    if returns.kind == "c51":
        return CategoricalHead(returns.atoms, returns.v_min, returns.v_max, device)
    if returns.kind == "quantile":
        return QuantileHead(returns.atoms, device)
    return ScalarHead(huber=settings.loss == "huber")


def build_network(
    settings: DQNSettings,
    spec: EnvSpec,
    device: torch.device = HOST,
    kind: Callable[..., QNetwork] | None = None,
) -> QNetwork:
    """Build the Q-network on the meta device, without memory; `kind`: None for the Q-head's."""
    assert isinstance(spec.action, DiscreteActions)
    noisy, head = partial(NoisyLinear, sigma=settings.noisy.sigma), build_q_head(settings)
    with on_meta():
        return (kind or head.network)(
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


BuildNetwork = Callable[[DQNSettings, EnvSpec, torch.device], QNetwork]


def build_policy(
    settings: DQNSettings,
    spec: EnvSpec,
    device: torch.device,
    engine: Engine = REFERENCE,
    network_builder: BuildNetwork = build_network,
) -> tuple[QNetwork, GreedyActor]:
    """Return a network with uninitialised weights, and its greedy actor."""
    network = materialize(network_builder(settings, spec, device), device)
    return network, build_greedy_actor(settings, network, device, engine)


def build_sampling_policy(
    settings: DQNSettings,
    spec: EnvSpec,
    device: torch.device,
    engine: Engine = REFERENCE,
    network_builder: BuildNetwork = build_network,
    *,
    num_envs: int,
    seed: int,
) -> tuple[QNetwork, Actor]:
    """Return the same network with an actor that explores as at the end of training."""
    del num_envs  # PPO's draws its noise for them
    network, best = build_policy(settings, spec, device, engine, network_builder)
    return network, build_behaviour_actor(
        settings, best, network, spec, lambda: settings.epsilon_end, seed
    )


def build_greedy_actor(
    settings: DQNSettings,
    network: QNetwork,
    device: torch.device,
    engine: Engine,
    host_weights: HostWeights | None = None,
) -> GreedyActor:
    """Build an actor that takes the actions with the highest expected return."""
    values = build_q_head(settings, device).values
    return greedy_q_actor(network, device, engine, values=values, host_weights=host_weights)


def build_behaviour_actor(
    settings: DQNSettings,
    best: GreedyActor,
    network: QNetwork,
    spec: EnvSpec,
    epsilon: Callable[[], float],
    seed: int,
) -> Actor:
    """Return the behaviour actor: ε-greedy, greedy with noisy weights, or both."""
    actor: Actor = best
    if network.is_noisy:
        actor = NoisyNetActor(best, noise_size=network.noise_size, seed=seed)
    if not settings.is_epsilon_greedy:
        return actor
    return EpsilonGreedyActor(actor, spec, epsilon=epsilon, seed=seed)
