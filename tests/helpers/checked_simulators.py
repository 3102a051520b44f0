"""Vector environments with one fault each, for `envs check checked_simulators:SimulatorNAME-v0`."""

from typing import ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class Drift(VectorEnv):
    """Numbers that drift at random, in torch; 9 steps an episode."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    length = 9

    def __init__(self, num_envs=1):
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generator = torch.Generator()

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.generator.manual_seed(seed)
        self.time = torch.zeros(self.num_envs, dtype=torch.int64)
        return self.observation(), {}

    def step(self, actions):
        over = self.time == self.length
        self.time = torch.where(over, 0, self.time + 1)
        reward, ends = 1.0 * ~over, self.time == self.length
        return self.observation(), reward, ends, torch.zeros_like(ends), {}

    def observation(self):
        return 2 * torch.rand(self.num_envs, 3, generator=self.generator) - 1


class Unseeded(Drift):
    """Draws from torch's global generator."""

    def observation(self):
        return torch.rand(self.num_envs, 3)


class Outside(Drift):
    """Its observations leave their space after a while."""

    def observation(self):
        return super().observation() + (self.time[:, None] == 7)


class Forgetful(Drift):
    """Gives a part of its state only."""

    def state_dict(self):
        return {"generator": self.generator}

    def load_state_dict(self, state):
        self.generator = state["generator"]


class Opaque(Drift):
    """Has state that nobody can save."""

    def __init__(self, num_envs=1):
        super().__init__(num_envs)
        self.engine = object()


class Endless(Drift):
    """Has no time limit."""

    length = 10**9


for kind in (Drift, Unseeded, Outside, Forgetful, Opaque, Endless):
    gym.register(f"Simulator{kind.__name__}-v0", vector_entry_point=kind)
