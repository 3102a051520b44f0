"""The parts of PPO that learn: loss spec, rollout, advantages and learner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from steadyrl.agents.actors.recurrent import RecurrentSamplingActor
from steadyrl.agents.actors.sampling import SamplingActor
from steadyrl.agents.engine.choice import build_engine
from steadyrl.agents.engine.cpu.host_weights import build_host_weights
from steadyrl.agents.engine.engine import Engine
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import BoxHead, Head, build_head
from steadyrl.agents.networks.init import initialise
from steadyrl.agents.networks.recurrent import RecurrentActorCritic
from steadyrl.agents.ppo.advantages import (
    Advantages,
    ComputeAdvantages,
    ObservationTransform,
    RewardTransform,
    RolloutEvaluator,
    compute_advantages,
)
from steadyrl.agents.ppo.fused import build_fused_rollout
from steadyrl.agents.ppo.loss import (
    METRICS,
    clipped_value_loss,
    evaluate_batch,
    evaluate_sequences,
    ppo_loss,
    value_loss,
    with_normalised_advantages,
)
from steadyrl.agents.ppo.minibatches import gather_indexed, indexed_minibatches, rank_minibatches
from steadyrl.agents.ppo.policy import (
    BuildNetwork,
    HostActorCritic,
    build_greedy_actor,
    build_sampling_actor,
)
from steadyrl.agents.ppo.popart import compute_advantages_popart
from steadyrl.agents.ppo.recurrent import SequenceEvaluator, sequence_minibatches
from steadyrl.agents.ppo.settings import PPOSettings, Schedules
from steadyrl.agents.ppo.transforms import (
    ClippedRewards,
    NormalisedObservations,
    ScaledRewards,
)
from steadyrl.agents.rollout_agent import (
    Minibatches,
    RolloutClock,
    RolloutParts,
    shuffled_minibatches,
)
from steadyrl.buffers.memory_layout import HOST
from steadyrl.buffers.rollout.buffer import RolloutBuffer, SampleField
from steadyrl.buffers.rollout.sequences import SequenceRollout, sequence_bytes
from steadyrl.envs.types import EnvSpec


@dataclass(frozen=True, kw_only=True)
class PPOParts(RolloutParts):
    """What PPO is made of."""

    schedules: Schedules
    targets: Advantages


def build_parts(
    settings: PPOSettings,
    spec: EnvSpec,
    extensions: Sequence[Extension],
    network_builder: BuildNetwork,
    *,
    device: torch.device,
    seed: int,
    total_steps: int,
) -> PPOParts:
    """Build all parts of an agent that learns for `total_steps` steps."""
    settings.validate_fit(spec, total_steps)
    seeds = np.random.SeedSequence(seed).generate_state(3).tolist()
    init_seed, act_seed, shuffle_seed = seeds
    samples = settings.rollout_steps * spec.num_envs
    largest = settings.largest_minibatch(samples)
    head = build_head(spec.action, device, scaled=settings.scale_actions)
    updates = settings.expected_updates(spec, total_steps)
    engine = build_engine(settings.compile, updates, spec, device)
    # Minibatches are gathered inside of compiled graphs on the host.
    in_graph = engine.traces and device.type == "cpu" and not settings.is_recurrent
    network = network_builder(settings, spec, head, device)
    # A graph has a static copy of a minibatch.
    copies = 2 * largest if engine.captures or engine.traces else largest
    fields = dict(chain.from_iterable(each.rollout_fields().items() for each in extensions))
    # The first allocation: it checks that all of PPO's parts fit.
    rollout = build_rollout(settings, spec, head, network, device, copies=copies, fields=fields)
    flat = FlatNetwork(initialise(network, init_seed, settings.network.init), device)
    gathers = rollout.sample_type if in_graph else None
    loss_spec = build_loss_spec(settings, head, largest, gathers=gathers)
    for extension in extensions:
        loss_spec = extension.loss_spec(loss_spec)
    learner = Learner(loss_spec, flat, engine)
    schedules = settings.schedules(total_steps, continuous=isinstance(head, BoxHead))
    # In the order of `ppo_loss`'s parameters after the batch; a constant c_e is bound to the loss.
    varying = (schedules.entropy_coef,) if settings.entropy_coef_varies else ()
    clock = RolloutClock(samples, rate=schedules.rate, scalars=(schedules.clip, *varying))
    host = build_host_actor_critic(settings, flat, spec, lambda: learner.updates, engine)
    size = settings.rollout_steps, spec.num_envs
    actor = build_sampling_actor(network, head, device, *size, act_seed, engine, host)
    actor.in_first_rollout = lambda: clock.in_first_rollout
    evaluator = build_evaluator(learner, head, largest, engine, actor)
    advantages = build_advantages(settings, network, clock, evaluator, spec.num_envs)
    next_obs = np.zeros((spec.num_envs, *spec.observation_shape), spec.dtype)
    return PPOParts(
        schedules=schedules,
        clock=clock,
        learner=learner,
        rollout=rollout,
        next_obs=next_obs,
        targets=advantages,
        minibatches=build_minibatches(settings, samples, learner, in_graph=in_graph),
        shuffling=torch.Generator().manual_seed(shuffle_seed),
        actor=actor,
        build_greedy=lambda: build_greedy_actor(network, head, device, engine, host),
        fused_rollout=engine.collector(
            partial(build_fused_rollout, settings, actor, rollout, advantages.rewards, next_obs)
        ),
    )


def build_evaluator(
    learner: Learner, head: Head, max_batch_size: int, engine: Engine, actor: SamplingActor
) -> RolloutEvaluator:
    """Return what computes log-probabilities and values of rollouts."""
    if isinstance(actor, RecurrentSamplingActor):
        return SequenceEvaluator(learner, head, max_batch_size, actor)
    stores = actor.stores_log_prob
    return RolloutEvaluator(learner, head, max_batch_size, engine, actor_evaluates=stores)


def build_loss_spec(
    settings: PPOSettings, head: Head, max_batch_size: int, *, gathers: type[Any] | None = None
) -> LossSpec:
    """Return PPO's loss spec for minibatches of at most `max_batch_size` samples.

    With `gathers`, the type of a batch, a minibatch is the samples' indices and all fields of the
    rollout: gathering them inside the graph is cheaper. Sequences come preprocessed and padded.
    """
    recurrent, target = settings.is_recurrent, settings.largest_kl
    loss = partial(
        ppo_loss,
        head=head,
        evaluate=evaluate_sequences if recurrent else evaluate_batch,
        value_loss=clipped_value_loss if settings.clip_value else value_loss,
        value_coef=settings.value_coef,
    )
    if not settings.entropy_coef_varies:  # else it is passed to each step
        coef = settings.initial_entropy_coef(continuous=isinstance(head, BoxHead))
        loss = partial(loss, entropy_coef=coef)
    preprocess = (
        with_normalised_advantages if gathers is None else partial(gather_indexed, kind=gathers)
    )
    spec = LossSpec(
        loss=loss,
        metrics=METRICS,
        optimizer=settings.optimizer,
        max_grad_norm=settings.max_grad_norm,
        grad_accumulation=settings.grad_accumulation,
        preprocess_batch=preprocess,
        watched=None if target is None else "train/approx_kl",
        limit=target,
        max_batch_size=max_batch_size,
    )
    if not recurrent:
        return spec
    microbatches = min(settings.grad_accumulation, max_batch_size // settings.length)
    return replace(spec, preprocess_batch=None, max_batch_size=None, grad_accumulation=microbatches)


def build_minibatches(
    settings: PPOSettings,
    samples: int,
    learner: Learner,
    comm: Comm = SINGLE_PROCESS,
    *,
    in_graph: bool = False,
) -> Minibatches:
    """Return the minibatches of rollouts of `samples` samples."""
    how: Any = {"epochs": settings.epochs, "count": settings.num_minibatches(samples)}
    if settings.is_recurrent:
        return sequence_minibatches(**how, comm=comm)
    if not comm.is_single:
        return rank_minibatches(**how, comm=comm)
    if in_graph:
        return indexed_minibatches(**how, max_batch_size=settings.largest_minibatch(samples))
    return shuffled_minibatches(learner, **how)


def build_advantages(
    settings: PPOSettings,
    network: ActorCritic,
    clock: RolloutClock,
    evaluator: RolloutEvaluator,
    num_envs: int,
) -> Advantages:
    """Return what computes advantages, in the forms of rewards, observations and values chosen."""
    kind = ScaledRewards if settings.normalizes_reward else RewardTransform
    rewards = (ClippedRewards if settings.clip_reward else kind)(num_envs, settings.gamma)
    observations = ObservationTransform()
    if network.normaliser is not None:
        size = evaluator.max_batch_size
        observations = NormalisedObservations(network.normaliser, clock, size)
    how: Any = {"gamma": settings.gamma, "gae_lambda": settings.gae_lambda}
    compute: ComputeAdvantages = partial(compute_advantages, **how)
    if network.popart is not None:
        head = network.value
        compute = partial(compute_advantages_popart, head=head, popart=network.popart, **how)
    return Advantages(rewards, observations, evaluator, compute)


def build_rollout(
    settings: PPOSettings,
    spec: EnvSpec,
    head: Head,
    network: ActorCritic,
    device: torch.device,
    *,
    copies: int,
    fields: Mapping[str, SampleField],
) -> RolloutBuffer:
    """Build the rollout buffer, after checking that all of PPO's parts fit in memory.

    They are the buffer, `copies` of its samples in minibatches, the noise, weights, gradient,
    optimiser state and temporaries.
    """
    samples = settings.rollout_steps * spec.num_envs
    noise = 4 * samples * math.prod(head.noise_shape)
    networks = 7 * sum(parameter.nbytes for parameter in network.parameters())
    extra_bytes = noise + networks
    kind: Callable[..., RolloutBuffer] = RolloutBuffer
    if isinstance(network, RecurrentActorCritic):
        length, hidden_state = settings.length, network.cell.hidden_shape
        size = 4 * math.prod(hidden_state)
        extra_bytes += sequence_bytes(settings.rollout_steps, spec.num_envs, length, size)
        sequences_per_batch = settings.largest_minibatch(samples) // length
        kind = partial(
            SequenceRollout,
            length=length,
            sequences_per_batch=sequences_per_batch,
            hidden_state=hidden_state,
        )
    return kind(
        steps=settings.rollout_steps,
        num_envs=spec.num_envs,
        observation_shape=spec.observation_shape,
        observation_dtype=getattr(torch, spec.dtype),
        action_shape=head.action_shape,
        action_dtype=head.action_dtype,
        device=device,
        copies=copies,
        extra_bytes=extra_bytes,
        fields=fields,
    )


def build_host_actor_critic(
    settings: PPOSettings,
    flat: FlatNetwork,
    spec: EnvSpec,
    updates: Callable[[], int],
    engine: Engine,
) -> HostActorCritic | None:
    """Return host weights and their head where acting on the host is faster than on the device."""
    network = flat.module
    assert isinstance(network, ActorCritic)
    if isinstance(network, RecurrentActorCritic) or settings.teacher.policy is not None:
        return None
    obs = np.zeros((spec.num_envs, *spec.observation_shape), spec.dtype)
    kinds = engine.policy, network.policy_params
    interval = settings.rollout_steps
    host_weights = build_host_weights(flat, updates, kinds, obs, copy_interval=interval)
    if host_weights is None:
        return None
    assert isinstance(host_weights.module, ActorCritic)
    head = build_head(spec.action, HOST, scaled=settings.scale_actions)
    return HostActorCritic(host_weights.module, head, host_weights.sync_weights)
