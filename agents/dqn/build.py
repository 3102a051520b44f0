"""The parts of DQN: networks, loss spec, replay and actors, and the choice of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedyActor
from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.actors.noisy import NoisyNetActor
from steadyrl.agents.base import Actor
from steadyrl.agents.dqn.fused import FusedRollout, build_fused_rollout
from steadyrl.agents.dqn.loss import METRICS, Munchausen, munchausen_td_loss, td_loss
from steadyrl.agents.dqn.noise import NoisyUpdates
from steadyrl.agents.dqn.q_heads import CategoricalHead, QHead, QuantileHead, ScalarHead
from steadyrl.agents.dqn.sampler import Sampler, local_sampler
from steadyrl.agents.dqn.settings import DQNSettings, Schedules
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.engine.cpu.host_weights import HostWeights, build_host_weights
from steadyrl.agents.engine.cpu.policy import q_policy_arrays
from steadyrl.agents.engine.engine import Engine, compile_mode
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.learner.schedules import UpdateClock
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.init import materialize, on_meta
from steadyrl.agents.networks.noisy import NoisyLinear, UpdateNoise
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.settings import is_large_image
from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.buffers.replay.build import build_replay
from steadyrl.envs.types import DiscreteActions, EnvSpec
from steadyrl.memory.budget import require

log = logging.getLogger("steadyrl")

HOST = torch.device("cpu")


class DQNParts(NamedTuple):
    """What DQN is made of."""

    actions: int  # number of actions
    clock: UpdateClock
    schedules: Schedules
    learner: Learner
    target: FlatNetwork
    replay: ReplayBuffer
    sampler: Sampler
    greedy: GreedyActor
    actor: Actor
    fused_rollout: FusedRollout | None
    extensions: tuple[Extension, ...]


def build_parts(
    settings: DQNSettings,
    spec: EnvSpec,
    extensions: Sequence[Extension],
    *,
    device: torch.device,
    seed: int,
    total_steps: int,
) -> DQNParts:
    """Build all parts of an agent that learns for `total_steps` steps."""
    settings.validate_fit(spec, total_steps)
    if total_steps <= settings.learning_starts:
        log.warning(
            f"nothing will be learned: the run has {total_steps:,} steps, and learning starts "
            f"after {settings.learning_starts:,}: lower agent.learning_starts"
        )
    seeds = np.random.SeedSequence(seed).generate_state(4).tolist()
    clock, schedules = build_clock(settings, total_steps), settings.schedules(total_steps)
    online, target = (init_network(settings, spec, device, seeds[1]) for _ in range(2))
    engine = build_engine(settings, spec, device, total_steps)
    replay = init_replay(settings, spec, device, seeds[2], engine)
    network = online.module
    assert isinstance(network, QNetwork) and isinstance(spec.action, DiscreteActions)
    loss_spec = build_loss_spec(settings, device, network.masks)
    for extension in extensions:
        loss_spec = extension.loss_spec(loss_spec)
    learner = Learner(loss_spec, online, engine, frozen=(target,))
    greedy = build_online_greedy_actor(settings, online, spec, lambda: learner.updates, engine)
    noise: tuple[Extension, ...] = ()
    if network.noise_size:
        noise = (NoisyUpdates(UpdateNoise(network.noise_size, device, seeds[3])),)
    epsilon = schedules.epsilon
    actor = behaviour_actor(greedy, network, spec, lambda: epsilon.at(clock.steps), seeds[0])
    return DQNParts(
        spec.action.n,
        clock,
        schedules,
        learner,
        target,
        replay,
        local_sampler(replay, settings.batch_size, prioritized=settings.replay.prioritized),
        greedy,
        actor,
        engine.collector(partial(build_fused_rollout, settings, actor, replay, clock, total_steps)),
        (*noise, *extensions),
    )


def build_clock(settings: DQNSettings, total_steps: int) -> UpdateClock:
    """Build the clock of a run's updates."""
    return UpdateClock(
        learning_starts=settings.learning_starts,
        train_every=settings.train_every,
        updates_per_train=settings.updates_per_train,
        target_every=settings.target_every,
        total_steps=total_steps,
    )


def build_policy(
    settings: DQNSettings, spec: EnvSpec, device: torch.device
) -> tuple[QNetwork, GreedyActor]:
    """Return a network with uninitialised weights, and its greedy actor."""
    network = materialize(build_network(settings, spec, device), device)
    return network, build_greedy_actor(settings, network, device, engine_of("eager"))


def build_sampling_policy(
    settings: DQNSettings, spec: EnvSpec, device: torch.device, *, seed: int
) -> tuple[QNetwork, Actor]:
    """Return the same network with an actor that explores as at the end of training."""
    network, best = build_policy(settings, spec, device)
    return network, behaviour_actor(best, network, spec, lambda: settings.epsilon_end, seed)


def build_head(settings: DQNSettings, device: torch.device = HOST) -> QHead:
    """Build the Q-head: scalar, C51 or quantiles."""
    returns = settings.distribution
    if returns.kind == "c51":
        return CategoricalHead(returns.atoms, returns.v_min, returns.v_max, device)
    if returns.kind == "quantile":
        return QuantileHead(returns.atoms, device)
    return ScalarHead(huber=settings.loss == "huber")


def build_loss(settings: DQNSettings) -> Callable[..., PerSampleLoss]:
    """Return the loss: with hard maxima as targets, or Munchausen's."""
    m = settings.munchausen
    if not m.enabled:
        return td_loss
    soft = Munchausen(alpha=m.alpha, temperature=m.temperature, log_policy_min=m.log_policy_min)
    return partial(munchausen_td_loss, munchausen=soft)


def build_loss_spec(
    settings: DQNSettings, device: torch.device = HOST, masks: Masks | None = None
) -> LossSpec:
    """Return DQN's loss spec."""
    return LossSpec(
        loss=partial(
            build_loss(settings),
            head=build_head(settings, device),
            double=settings.double,
            masks=masks,
        ),
        metrics=METRICS,
        optimizer=settings.optimizer,
        max_grad_norm=settings.max_grad_norm,
        grad_accumulation=settings.grad_accumulation,
    )


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


def init_network(
    settings: DQNSettings, spec: EnvSpec, device: torch.device, seed: int
) -> FlatNetwork:
    """Build and initialise a network, for learning or as the target."""
    module = build_network(settings, spec, device)
    # Weights, gradient and optimiser state; the target network calls this as well.
    require("networks", 3 * sum(parameter.nbytes for parameter in module.parameters()))
    require("the loss of agent.distribution.atoms", loss_bytes(settings, spec))
    materialize(module, torch.device("cpu"))
    module.reset_parameters(torch.Generator().manual_seed(seed), settings.network.init)
    return FlatNetwork(module, device)


def init_replay(
    settings: DQNSettings, spec: EnvSpec, device: torch.device, seed: int, engine: Engine
) -> ReplayBuffer:
    """Build the replay; for a CUDA graph, batches are written into static buffers."""
    return build_replay(
        settings.replay,
        frame_shape=spec.frame_shape,
        dtype=spec.dtype,
        frame_stack=spec.frame_stack,
        num_envs=spec.num_envs,
        n_step=settings.n_step,
        gamma=settings.gamma,
        device=device,
        seed=seed,
        cuda_graph=engine.captures,
    )


def build_engine(
    settings: DQNSettings, spec: EnvSpec, device: torch.device, total_steps: int
) -> Engine:
    """Select how updates run: eagerly, as a compiled graph or as a CUDA graph."""
    expected = settings.expected_updates(spec, total_steps)
    large = is_large_image(spec.unmasked_shape)
    return engine_of(compile_mode(settings.compile, device, expected, large_images=large))


def loss_bytes(settings: DQNSettings, spec: EnvSpec) -> int:
    """Return the bytes of a distributional loss: each atom is compared with each target atom."""
    if settings.distribution.kind == "none":
        return 0
    assert isinstance(spec.action, DiscreteActions)
    atoms = settings.distribution.atoms
    targets = atoms * (spec.action.n if settings.munchausen.enabled else 1)
    # Differences, losses, weights and products, and as much for their gradients.
    samples = -(-settings.batch_size // settings.grad_accumulation)  # per microbatch
    return 8 * 4 * samples * atoms * targets


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
        return GreedyActor(
            network,
            on_host,
            device,
            best,
            sync_weights,
            cuda_graph=engine.captures,
            policy_arrays=None if on_host is None else q_policy_arrays(on_host),
        )

    def allowed(obs: Tensor, *noise: Tensor) -> Tensor:
        return masks.forbid(head.values(network(obs, *noise)), obs)

    return GreedyActor(allowed, None, device, lambda q: q.argmax(1))


def build_online_greedy_actor(
    settings: DQNSettings,
    online: FlatNetwork,
    spec: EnvSpec,
    updates: Callable[[], int],
    engine: Engine,
) -> GreedyActor:
    """Build the greedy actor of the online network, on the host where that is faster."""
    network, device = online.module, online.weights.device
    assert isinstance(network, QNetwork)
    host_weights = None
    if not network.is_noisy and settings.teacher.policy is None:  # both run on its device
        obs = np.zeros((spec.num_envs, *spec.observation_shape), spec.dtype)
        interval = settings.train_every / spec.num_envs
        host_weights = build_host_weights(
            online, updates, (engine.policy, network), obs, copy_interval=interval
        )
    return build_greedy_actor(settings, network, device, engine, host_weights)


def behaviour_actor(
    best: GreedyActor, network: QNetwork, spec: EnvSpec, epsilon: Callable[[], float], seed: int
) -> Actor:
    """Return the behaviour actor: ε-greedy, or greedy with noisy weights."""
    assert isinstance(spec.action, DiscreteActions)
    if network.is_noisy:
        return NoisyNetActor(best, noise_size=network.noise_size, seed=seed)
    masks = Masks.of(spec, HOST)
    return EpsilonGreedyActor(best, actions=spec.action.n, epsilon=epsilon, seed=seed, masks=masks)
