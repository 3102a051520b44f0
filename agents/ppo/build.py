"""The parts of PPO: network, loss spec, rollout and actors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from steadyrl.agents.actors.recurrent import RecurrentGreedyActor, RecurrentSamplingActor
from steadyrl.agents.actors.sampling import SamplingActor, greedy_policy_actor
from steadyrl.agents.base import Actor
from steadyrl.agents.engine.cpu.host_weights import build_host_weights
from steadyrl.agents.engine.cpu.policy import policy_on_host
from steadyrl.agents.engine.engine import Mode, compile_mode
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import Head, build_head
from steadyrl.agents.networks.init import materialize
from steadyrl.agents.networks.recurrent import RecurrentActorCritic
from steadyrl.agents.networks.settings import is_large_image
from steadyrl.agents.ppo.loss import ppo_loss, sample_loss_spec, sequence_loss_spec
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.buffers.rollout.buffer import RolloutBatch, RolloutBuffer
from steadyrl.buffers.rollout.sequences import SequenceRollout, sequence_bytes
from steadyrl.envs.types import EnvSpec

HOST = torch.device("cpu")


def build_network(
    settings: PPOSettings, spec: EnvSpec, head: Head, device: torch.device
) -> ActorCritic:
    """Build the actor-critic on the meta device, without memory."""
    kind: Callable[..., ActorCritic] = ActorCritic
    if settings.recurrent.cell != "none":
        kind = partial(
            RecurrentActorCritic,
            recurrent=settings.recurrent.cell,
            size=settings.recurrent.size,
            max_length=settings.length,
        )
    with torch.device("meta"):
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


def init_network(
    network: ActorCritic, settings: PPOSettings, device: torch.device, seed: int
) -> FlatNetwork:
    """Allocate and initialise a network for learning."""
    materialize(network, torch.device("cpu"))
    network.reset_parameters(torch.Generator().manual_seed(seed), settings.network.init)
    return FlatNetwork(network, device)


def update_mode(
    settings: PPOSettings, spec: EnvSpec, device: torch.device, total_steps: int
) -> Mode:
    """Select how updates run: eagerly, as a compiled graph or as a CUDA graph."""
    expected = settings.expected_updates(spec, total_steps)
    large = is_large_image(spec.unmasked_shape)
    return compile_mode(settings.compile, device, expected, large_images=large)


def gathers_in_graph(settings: PPOSettings, mode: Mode, device: torch.device) -> bool:
    """Return whether minibatches are gathered inside the graph: in compiled graphs on the host."""
    return mode == "compiled" and device.type == "cpu" and settings.recurrent.cell == "none"


def build_loss_spec(
    settings: PPOSettings,
    head: Head,
    max_batch_size: int,
    *,
    gathers_in_graph: bool,
    loss: Callable[..., PerSampleLoss] = ppo_loss,
    batch: type[Any] = RolloutBatch,
) -> LossSpec:
    """Return the loss spec of `loss` for minibatches of at most `max_batch_size` samples."""
    if settings.recurrent.cell != "none":
        return sequence_loss_spec(settings, head, max_batch_size, loss)
    return sample_loss_spec(
        settings, head, max_batch_size, loss, batch if gathers_in_graph else None
    )


def init_rollout(
    settings: PPOSettings,
    spec: EnvSpec,
    head: Head,
    network: ActorCritic,
    device: torch.device,
    *,
    copies: int,
    kinds: tuple[type[RolloutBuffer], type[SequenceRollout]] = (RolloutBuffer, SequenceRollout),
    extra_sample_bytes: int = 0,
    **extra: Any,
) -> RolloutBuffer:
    """Build the rollout buffer, after checking that all of PPO's parts fit in memory.

    Counted are `copies` of its samples, the noise, weights, gradient, optimiser state and
    temporaries. The second of `kinds` is for recurrent policies. A subclass that stores
    `extra_sample_bytes` more bytes per sample gets `extra` as arguments.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    sample_bytes = math.prod(spec.observation_shape) * dtype.itemsize
    sample_bytes += math.prod(head.action_shape) * head.action_dtype.itemsize + 5 * 4
    samples = settings.rollout_steps * spec.num_envs
    noise = 4 * samples * math.prod(head.noise_shape)
    networks = 7 * sum(parameter.nbytes for parameter in network.parameters())
    extra_bytes = copies * sample_bytes + noise + networks + (samples + copies) * extra_sample_bytes
    kind = kinds[0]
    if isinstance(network, RecurrentActorCritic):
        length, hidden_state = settings.length, network.cell.hidden_shape
        size = 4 * math.prod(hidden_state)
        extra_bytes += sequence_bytes(settings.rollout_steps, spec.num_envs, length, size)
        sequences_per_batch = settings.largest_minibatch(samples) // length
        kind = kinds[1]
        extra |= {
            "length": length,
            "sequences_per_batch": sequences_per_batch,
            "hidden_state": hidden_state,
        }
    return kind(
        steps=settings.rollout_steps,
        num_envs=spec.num_envs,
        observation_shape=spec.observation_shape,
        observation_dtype=dtype,
        action_shape=head.action_shape,
        action_dtype=head.action_dtype,
        device=device,
        extra_bytes=extra_bytes,
        **extra,
    )


def build_policy(
    settings: PPOSettings, spec: EnvSpec, device: torch.device
) -> tuple[ActorCritic, Actor]:
    """Return a network with uninitialised weights, and the actor that takes its mode."""
    network, head = _untrained(settings, spec, device)
    return network, build_greedy_actor(network, head, device)


def _untrained(
    settings: PPOSettings, spec: EnvSpec, device: torch.device
) -> tuple[ActorCritic, Head]:
    head = build_head(spec.action, device, scaled=settings.scale_actions)
    return materialize(build_network(settings, spec, head, device), device), head


def build_greedy_actor(
    network: ActorCritic, head: Head, device: torch.device, host_copy: HostCopy | None = None
) -> Actor:
    """Return an actor that takes the policy's mode."""
    if isinstance(network, RecurrentActorCritic):
        return RecurrentGreedyActor(network, head, device)
    if host_copy is not None:
        return greedy_policy_actor(host_copy.network, host_copy.head, HOST, host_copy.sync_weights)
    return greedy_policy_actor(network, head, device)


def build_sampling_policy(
    settings: PPOSettings, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
) -> tuple[ActorCritic, Actor]:
    """Return the same network with an actor that samples from its distribution."""
    network, head = _untrained(settings, spec, device)
    return network, build_sampling_actor(network, head, device, 1, num_envs, seed)


class HostCopy(NamedTuple):
    """A copy of the network on the host, for actors there while a device learns."""

    network: ActorCritic
    head: Head
    sync_weights: Callable[[], None]


def build_host_copy(
    settings: PPOSettings, flat: FlatNetwork, spec: EnvSpec, updates: Callable[[], int]
) -> HostCopy | None:
    """Return a host copy of the network where acting on the host is faster than on the device."""
    network = flat.module
    assert isinstance(network, ActorCritic)
    if isinstance(network, RecurrentActorCritic) or settings.teacher.policy is not None:
        return None
    obs = np.zeros((spec.num_envs, *spec.observation_shape), spec.dtype)
    kinds = policy_on_host, network.policy_params
    host_copy = build_host_weights(flat, updates, kinds, obs, copy_interval=settings.rollout_steps)
    if host_copy is None:
        return None
    assert isinstance(host_copy.module, ActorCritic)
    head = build_head(spec.action, HOST, scaled=settings.scale_actions)
    return HostCopy(host_copy.module, head, host_copy.sync_weights)


def build_sampling_actor(
    network: ActorCritic,
    head: Head,
    device: torch.device,
    timesteps: int,
    num_envs: int,
    seed: int,
    host_copy: HostCopy | None = None,
    mode: Mode = "eager",
) -> SamplingActor:
    """Return a sampling actor, with noise for `timesteps` timesteps drawn at once."""
    size: Any = {"timesteps": timesteps, "num_envs": num_envs, "device": device, "seed": seed}
    if isinstance(network, RecurrentActorCritic):
        return RecurrentSamplingActor(network, head, **size)
    if host_copy is None:
        cuda_graph = mode == "cudagraph"
        return SamplingActor(network, head, policy_on_host(network), **size, cuda_graph=cuda_graph)
    on_host = policy_on_host(host_copy.network)
    return SamplingActor(
        network, host_copy.head, on_host, **size, sync_weights=host_copy.sync_weights
    )
