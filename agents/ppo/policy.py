"""PPO's policy: network, greedy actor and sampling actor. A trained one needs nothing else.

Imports no compiler: machine code comes with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from steadyrl.agents.actors.recurrent import RecurrentGreedyActor, RecurrentSamplingActor
from steadyrl.agents.actors.sampling import SamplingActor, greedy_policy_actor
from steadyrl.agents.base import Actor
from steadyrl.agents.engine.eager import REFERENCE
from steadyrl.agents.engine.engine import Engine
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import Head, build_head
from steadyrl.agents.networks.init import materialize, on_meta
from steadyrl.agents.networks.recurrent import RecurrentActorCritic
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.buffers.memory_layout import HOST
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import EnvSpec


def build_network(
    settings: PPOSettings,
    spec: EnvSpec,
    head: Head,
    device: torch.device,
    kind: Callable[..., ActorCritic] = ActorCritic,
) -> ActorCritic:
    """Build the actor-critic on the meta device, without memory."""
    if settings.is_recurrent:
        kind = RecurrentActorCritic if kind is ActorCritic else kind
        made = kind.func if isinstance(kind, partial) else kind
        if not (isinstance(made, type) and issubclass(made, RecurrentActorCritic)):
            reason = "must be none: this network has no recurrent form"
            raise SettingError("agent.recurrent.cell", settings.recurrent.cell, reason)
        kind = partial(
            kind,
            recurrent=settings.recurrent.cell,
            size=settings.recurrent.size,
            max_length=settings.length,
        )
    with on_meta():
        return kind(
            spec.unmasked_shape,
            spec.dtype,
            head,
            hidden=settings.hidden,
            shared=settings.shared_trunk,
            normalise=settings.normalizes_obs(spec),
            log_std=settings.log_std_init,
            network=settings.network,
            masks=Masks.of(spec, device),
            popart=settings.popart,
        )


BuildNetwork = Callable[[PPOSettings, EnvSpec, Head, torch.device], ActorCritic]


def build_policy(
    settings: PPOSettings,
    spec: EnvSpec,
    device: torch.device,
    engine: Engine = REFERENCE,
    network_builder: BuildNetwork = build_network,
) -> tuple[ActorCritic, Actor]:
    """Return a network with uninitialised weights, and the actor that takes its mode."""
    network, head = build_network_and_head(settings, spec, device, network_builder)
    return network, build_greedy_actor(network, head, device, engine)


def build_network_and_head(
    settings: PPOSettings, spec: EnvSpec, device: torch.device, network_builder: BuildNetwork
) -> tuple[ActorCritic, Head]:
    """Return a network with uninitialised weights, and the head that its outputs parametrise."""
    head = build_head(spec.action, device, scaled=settings.scale_actions)
    return materialize(network_builder(settings, spec, head, device), device), head


def build_greedy_actor(
    network: ActorCritic,
    head: Head,
    device: torch.device,
    engine: Engine,
    host: HostActorCritic | None = None,
) -> Actor:
    """Return an actor that takes the policy's mode."""
    if isinstance(network, RecurrentActorCritic):
        hidden_state = torch.zeros((0, *network.cell.hidden_shape), device=device)
        return RecurrentGreedyActor(network, lambda p: head.to_env(head.greedy(p)), hidden_state)
    if host is not None:
        network, head, sync_weights = host
        return greedy_policy_actor(network, head, HOST, sync_weights, engine)
    return greedy_policy_actor(network, head, device, engine=engine)


def build_sampling_policy(
    settings: PPOSettings,
    spec: EnvSpec,
    device: torch.device,
    engine: Engine = REFERENCE,
    network_builder: BuildNetwork = build_network,
    *,
    num_envs: int,
    seed: int,
) -> tuple[ActorCritic, Actor]:
    """Return the same network with an actor that samples from its distribution."""
    network, head = build_network_and_head(settings, spec, device, network_builder)
    return network, build_sampling_actor(network, head, device, 1, num_envs, seed, engine)


class HostActorCritic(NamedTuple):
    """The network of the host weights and its head: for acting there while a device learns."""

    network: ActorCritic
    head: Head
    sync_weights: Callable[[], None]


def build_sampling_actor(
    network: ActorCritic,
    head: Head,
    device: torch.device,
    timesteps: int,
    num_envs: int,
    seed: int,
    engine: Engine,
    host: HostActorCritic | None = None,
) -> SamplingActor:
    """Return a sampling actor, with noise for `timesteps` timesteps drawn at once."""
    size: Any = {"timesteps": timesteps, "num_envs": num_envs, "device": device, "seed": seed}
    if isinstance(network, RecurrentActorCritic):
        return RecurrentSamplingActor(network, head, **size)
    if host is None:
        on_host, captures = engine.policy(network), engine.captures
        return SamplingActor(network, head, on_host, **size, cuda_graph=captures)
    on_host = engine.policy(host.network)
    return SamplingActor(network, host.head, on_host, **size, sync_weights=host.sync_weights)
