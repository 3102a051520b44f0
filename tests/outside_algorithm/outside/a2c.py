"""A2C (Mnih et al. 2016): one gradient step on each short rollout."""

from dataclasses import replace
from functools import partial

import torch

from steadyrl.agents.actors.sampling import SamplingActor, greedy_policy_actor
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.learner.optimizers.settings import ADAM
from steadyrl.agents.learner.schedules import over_the_run
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import build_head
from steadyrl.agents.networks.init import initialise, materialize, on_meta
from steadyrl.agents.networks.settings import PLAIN
from steadyrl.agents.ppo.loss import with_normalised_advantages
from steadyrl.agents.rollout_agent import (
    GAE,
    RolloutAgent,
    RolloutClock,
    RolloutParts,
    shuffled_minibatches,
)
from steadyrl.buffers.rollout.buffer import RolloutBuffer


def a2c_loss(network, batch, *, head, entropy_coef):
    """Return −A log π(a given o) + ½(V − R)² − c·H of each sample."""
    parameters, value = network(batch.obs)
    log_prob, entropy = head.evaluate(parameters, batch.action)
    policy, squares = -batch.advantage * log_prob, 0.5 * (value - batch.return_).square()
    return PerSampleLoss(policy + squares - entropy_coef * entropy, (policy, squares, entropy))


def build(settings, spec, device):
    """Build the head, and the network on the meta device."""
    head = build_head(spec.action, device, scaled=True)
    shape = {"shared": False, "normalise": False, "log_std": 0.0}
    with on_meta():
        network = ActorCritic(
            spec.observation_shape,
            spec.dtype,
            head,
            hidden=settings.hidden,
            network=replace(PLAIN, activation="tanh"),
            **shape,
        )
    return head, network


class A2C(RolloutAgent):
    """Learns from rollouts of T timesteps of N environments."""

    def __init__(self, settings, spec, *, device, seed, total_steps):
        head, network = build(settings, spec, device)
        loss_spec = LossSpec(
            loss=partial(a2c_loss, head=head, entropy_coef=settings.entropy_coef),
            metrics=("train/policy_loss", "train/value_loss", "train/entropy"),
            optimizer=replace(ADAM, eps=1e-5),
            max_grad_norm=settings.max_grad_norm,
            grad_accumulation=1,
            preprocess_batch=with_normalised_advantages,
        )
        learner = Learner(loss_spec, FlatNetwork(initialise(network, seed), device), "direct")
        steps, size = settings.rollout_steps, {"num_envs": spec.num_envs, "device": device}
        rate = over_the_run("linear", settings.learning_rate, 0.0, 0.0, total_steps)
        super().__init__(
            RolloutParts(
                clock=RolloutClock(steps * spec.num_envs, rate=rate),
                learner=learner,
                rollout=RolloutBuffer(
                    steps=steps,
                    observation_shape=spec.observation_shape,
                    observation_dtype=getattr(torch, spec.dtype),
                    action_shape=head.action_shape,
                    action_dtype=head.action_dtype,
                    **size,
                ),
                targets=GAE(learner, gamma=settings.gamma, gae_lambda=settings.gae_lambda),
                minibatches=shuffled_minibatches(learner, epochs=1, count=1),
                shuffling=torch.Generator().manual_seed(seed),
                actor=SamplingActor(network, head, None, timesteps=steps, seed=seed + 1, **size),
                build_greedy=lambda: greedy_policy_actor(network, head, device),
            )
        )

    @classmethod
    def policy(cls, settings, spec, device):
        """Build the network of a finished policy, and its greedy actor."""
        head, network = build(settings, spec, device)
        return materialize(network, device), greedy_policy_actor(network, head, device)
