"""The parts of DQN that learn: loss spec, networks, learner, and the choice of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.dqn.fused import FusedRollout, build_fused_rollout
from steadyrl.agents.dqn.loss import METRICS, Munchausen, munchausen_td_loss, td_loss
from steadyrl.agents.dqn.noise import UpdateNoise
from steadyrl.agents.dqn.policy import (
    BuildNetwork,
    build_behaviour_actor,
    build_greedy_actor,
    build_network,
    build_q_head,
)
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.engine.choice import build_engine
from steadyrl.agents.engine.cpu.host_weights import build_host_weights
from steadyrl.agents.engine.engine import Engine
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.learner.schedules import Schedule
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.init import initialise
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.replay_agent import ReplayParts, init_replay
from steadyrl.buffers.memory_layout import HOST
from steadyrl.envs.types import DiscreteActions, EnvSpec
from steadyrl.memory.budget import require


@dataclass(frozen=True, kw_only=True)
class DQNParts(ReplayParts):
    """What DQN is made of."""

    epsilon: Schedule
    fused_rollout: FusedRollout | None
    extensions: tuple[Extension, ...]


def build_parts(
    settings: DQNSettings,
    spec: EnvSpec,
    extensions: Sequence[Extension],
    network_builder: BuildNetwork,
    *,
    device: torch.device,
    seed: int,
    total_steps: int,
) -> DQNParts:
    """Build all parts of an agent that learns for `total_steps` steps."""
    settings.validate_fit(spec, total_steps)
    seeds = np.random.SeedSequence(seed).generate_state(4).tolist()
    act_seed, init_seed, replay_seed, noise_seed = seeds
    clock, epsilon = settings.clock(total_steps), settings.epsilons(total_steps)
    require_memory(settings, spec, device, network_builder)
    # By one seed: they start equal.
    common = (settings, spec, device, init_seed, network_builder)
    online, target = (init_network(*common, learns=learns) for learns in (True, False))
    updates = settings.expected_updates(spec, total_steps)
    engine = build_engine(settings.compile, updates, spec, device)
    replay = init_replay(settings, spec, device, replay_seed, engine)
    network = online.module
    assert isinstance(network, QNetwork) and isinstance(spec.action, DiscreteActions)
    loss_spec = build_loss_spec(settings, device, network.masks)
    for extension in extensions:
        loss_spec = extension.loss_spec(loss_spec)
    learner = Learner(loss_spec, online, engine, frozen=(target,))
    greedy = build_online_greedy_actor(settings, online, spec, lambda: learner.updates, engine)
    noise: tuple[Extension, ...] = ()
    if network.noise_size:
        noise = (UpdateNoise(network.noise_size, device, noise_seed),)
    actor = build_behaviour_actor(
        settings, greedy, network, spec, lambda: epsilon.at(clock.steps), act_seed
    )
    return DQNParts(
        settings=settings,
        actions=spec.action.n,
        clock=clock,
        epsilon=epsilon,
        rate=settings.learning_rates(total_steps),
        beta=settings.betas(total_steps),
        learner=learner,
        target=target,
        replay=replay,
        actor=actor,
        build_greedy=lambda: greedy,
        fused_rollout=engine.collector(
            partial(build_fused_rollout, settings, actor, replay, clock, total_steps)
        ),
        extensions=(*noise, *extensions),
    )


def build_loss_spec(
    settings: DQNSettings, device: torch.device = HOST, masks: Masks | None = None
) -> LossSpec:
    """Return DQN's loss spec: with hard maxima as targets, or Munchausen's soft ones."""
    loss: Callable[..., PerSampleLoss] = td_loss
    m = settings.munchausen
    if m.enabled:
        soft = Munchausen(alpha=m.alpha, temperature=m.temperature, log_policy_min=m.log_policy_min)
        loss = partial(munchausen_td_loss, munchausen=soft)
    return LossSpec(
        loss=partial(
            loss,
            head=build_q_head(settings, device),
            double=settings.double,
            masks=masks,
        ),
        metrics=METRICS,
        optimizer=settings.optimizer,
        max_grad_norm=settings.max_grad_norm,
        grad_accumulation=settings.grad_accumulation,
    )


def init_network(
    settings: DQNSettings,
    spec: EnvSpec,
    device: torch.device,
    seed: int,
    network_builder: BuildNetwork = build_network,
    *,
    learns: bool = True,
) -> FlatNetwork:
    """Build and initialise a network, for learning or as the target."""
    module = network_builder(settings, spec, device)
    return FlatNetwork(initialise(module, seed, settings.network.init), device, learns=learns)


def require_memory(
    settings: DQNSettings, spec: EnvSpec, device: torch.device, network_builder: BuildNetwork
) -> None:
    """Refuse networks, and the loss of a distribution, that do not fit."""
    parameters = network_builder(settings, spec, device).parameters()  # without memory
    # Weights of both networks, the gradient, and two moments of the optimiser.
    require("networks", 5 * sum(each.nbytes for each in parameters), device=device)
    what = "the loss of agent.distribution.atoms"
    require(what, loss_bytes(settings, spec), device=device)


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
