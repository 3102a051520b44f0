"""PPO agents and episodes for tests."""

import numpy as np
import torch
from changed import changed

from steadyrl.agents.learner.optimizers.settings import OptimizerSettings
from steadyrl.agents.networks.settings import PLAIN
from steadyrl.agents.ppo.settings import PPOSettings, RecurrentSettings, RNDSettings
from steadyrl.agents.registry import build_agent
from steadyrl.agents.settings import TeacherSettings
from steadyrl.envs.types import (
    BoxActions,
    DiscreteActions,
    EnvSpec,
    MultiBinaryActions,
    MultiDiscreteActions,
    Step,
)

CPU = torch.device("cpu")

SPACES = {
    "discrete": DiscreteActions(3),
    "multidiscrete": MultiDiscreteActions((2, 4)),
    "multibinary": MultiBinaryActions(3),
    # Bounds so tight that nearly every action is clipped.
    "box": BoxActions((-1e-3, -1e-3), (1e-3, 1e-3)),
}

SETTINGS = PPOSettings(
    name="ppo",
    network=changed(PLAIN, activation="tanh"),
    hidden=(16,),
    shared_trunk=None,
    log_std_init=0.0,
    scale_actions=True,
    optimizer=OptimizerSettings(name="adam", eps=1e-5, weight_decay=0.0),
    learning_rate=1e-3,
    anneal_learning_rate="linear",
    learning_rate_end=0.0,
    learning_rate_warmup=0.0,
    adapt_learning_rate="none",
    gamma=0.9,
    gae_lambda=0.95,
    rollout_steps=16,
    epochs=2,
    minibatches=4,
    batch_size=None,
    clip=0.2,
    anneal_clip="constant",
    clip_end=0.0,
    clip_warmup=0.0,
    clip_value=False,
    entropy_coef=0.01,
    anneal_entropy_coef="constant",
    entropy_coef_end=0.0,
    entropy_coef_warmup=0.0,
    value_coef=0.5,
    max_grad_norm=0.5,
    target_kl=None,
    normalize_obs=False,
    normalize_reward=False,
    popart=False,
    clip_reward=False,
    rnd=RNDSettings(coef=0.0, fraction=1.0, gamma=0.99),
    recurrent=RecurrentSettings(cell="none", size=8, sequence_length=5),
    teacher=TeacherSettings(policy=None, coef=1.0, fraction=0.5, acts=0.0),
    grad_accumulation=1,
    compile="false",
)


def build(
    envs=3, action=SPACES["discrete"], shape=(4,), dtype="float32", total=10_000, seed=0, mask=0,
    **changes,
):  # fmt: skip
    spec = EnvSpec("Synthetic", envs, shape, dtype, 1, action, mask=mask)
    settings = changed(SETTINGS, **changes)
    return build_agent(settings, spec, device=CPU, seed=seed, total_steps=total)


def extension(agent):
    """Return the agent's only extension, or its last."""
    return agent._extensions[-1]


class Episodes:
    """Random observations and rewards, in episodes of random length with reset steps."""

    def __init__(self, envs=3, shape=(4,), seed=0, mean_length=5, scale=1.0):
        self.random = np.random.default_rng(seed)
        self.shape = (envs, *shape)
        self.needs_reset = np.zeros(envs, dtype=bool)
        self.end = 1 / mean_length
        self.scale = scale

    def reset(self):
        return (self.random.normal(size=self.shape) * self.scale).astype(np.float32)

    def step(self):
        valid = ~self.needs_reset
        envs = len(valid)
        terminated = (self.random.random(envs) < self.end / 2) & valid
        truncated = (self.random.random(envs) < self.end / 2) & valid
        self.needs_reset = terminated | truncated
        reward = (self.random.normal(size=envs) * self.scale * valid).astype(np.float32)
        return Step(self.reset(), reward, terminated, truncated, valid, ())


def act(agent, obs, *, explore=True):
    """Return a decision of the behaviour actor, or of a greedy one."""
    return agent.actor(len(obs), explore=explore).act(obs, np.zeros(len(obs), dtype=bool))


def collect(agent, env, obs, rows):
    """Act and observe for some timesteps; return the last observations."""
    for _ in range(rows):
        decision = act(agent, obs)
        step = env.step()
        agent.observe(decision, step)
        obs = step.obs
    return obs


def learn(agent, env, obs, updates):
    """Collect rollouts and update; return each update's metrics, and the last observations."""
    found = []
    for _ in range(updates):
        obs = collect(agent, env, obs, agent._settings.rollout_steps)
        metrics = agent.update()
        found.append(dict(zip(metrics.names, metrics.values.tolist(), strict=True)))
    return found, obs
