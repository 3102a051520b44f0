"""A2C (Mnih et al. 2016): one gradient step on each short rollout."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from steadyrl.agents.actors.sampling import SamplingActor, greedy_policy_actor
from steadyrl.agents.base import Agent
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.learner.optimizers.settings import ADAM
from steadyrl.agents.learner.schedules import linear
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import build_head
from steadyrl.agents.networks.settings import PLAIN
from steadyrl.agents.ppo.loss import normalize_advantages
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
    with torch.device("meta"):
        network = ActorCritic(
            spec.observation_shape,
            spec.dtype,
            head,
            hidden=settings.hidden,
            network=replace(PLAIN, activation="tanh"),
            **shape,
        )
    return head, network


class A2C(Agent):
    """Learns from rollouts of T timesteps of N environments."""

    state_names = ("_learner", "_actor", "_rollout", "_order", "_next_obs", "_steps")

    def __init__(self, settings, spec, *, device, seed, total_steps):
        self._settings, self._device, self._total = settings, device, total_steps
        self._head, network = build(settings, spec, device)
        network.to_empty(device="cpu").reset_parameters(torch.Generator().manual_seed(seed))
        flat = FlatNetwork(network, device)
        common = {"num_envs": spec.num_envs, "device": device}
        self._actor = SamplingActor(
            network,
            self._head,
            None,
            timesteps=settings.rollout_steps,
            seed=seed + 1,
            in_first_rollout=bool,
            **common,
        )
        self._rollout = RolloutBuffer(
            steps=settings.rollout_steps,
            observation_shape=spec.observation_shape,
            observation_dtype=getattr(torch, spec.dtype),
            action_shape=self._head.action_shape,
            action_dtype=self._head.action_dtype,
            **common,
        )
        loss_spec = LossSpec(
            loss=partial(a2c_loss, head=self._head, entropy_coef=settings.entropy_coef),
            metrics=("train/policy_loss", "train/value_loss", "train/entropy"),
            optimizer=replace(ADAM, eps=1e-5),
            max_grad_norm=settings.max_grad_norm,
            grad_accumulation=1,
            preprocess_batch=normalize_advantages,
        )
        self._learner = Learner(loss_spec, flat, "eager")
        self._next_obs = np.zeros((spec.num_envs, *spec.observation_shape), spec.dtype)
        self._order = torch.Generator(device).manual_seed(seed)  # order of samples
        self._steps = 0

    @classmethod
    def policy(cls, settings, spec, device):
        """Build the network of a finished policy, and its greedy actor."""
        head, network = build(settings, spec, device)
        network.to_empty(device=device)
        return network, greedy_policy_actor(network, head, device)

    def actor(self, num_envs, *, explore):
        """Return the sampling actor, or a greedy one."""
        network = self._learner.network.module
        return self._actor if explore else greedy_policy_actor(network, self._head, self._device)

    def observe(self, decision, step):
        """Store the timestep."""
        acted = (decision.obs, decision.raw_action, decision.log_prob, decision.value)
        self._rollout.add(*acted, step.reward, step.terminated, step.truncated, step.valid)
        np.copyto(self._next_obs, step.obs)
        self._steps += int(step.valid.sum())

    def update(self):
        """Take one gradient step once the rollout is full, and clear it."""
        if not self._rollout.full:
            return None
        s, network = self._settings, self._learner.network.module
        with torch.inference_mode():
            _, last_value = network(torch.from_numpy(self._next_obs).to(self._device))
        self._rollout.compute_advantages(last_value, gamma=s.gamma, gae_lambda=s.gae_lambda)
        for batch in self._rollout.minibatches(1, self._order):
            self._learner.step(batch, linear(s.learning_rate, 0.0, self._total, self._steps))
        self._rollout.clear()
        return self._learner.means()

    def release(self):
        """Free the rollout and the network."""
        self._rollout.release()
        del self._learner, self._actor
