"""CartPole that raises now and then, like a real simulator."""

from __future__ import annotations

import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class CrashingCartPole(CartPoleEnv):
    """Raises in one step of 2,000 and in one reset of 200."""

    def step(self, action):
        if self.np_random.random() < 5e-4:
            raise RuntimeError("the simulator crashed in a step")
        return super().step(action)

    def reset(self, *, seed=None, options=None):
        row = super().reset(seed=seed, options=options)
        if self.np_random.random() < 5e-3:
            raise RuntimeError("the simulator crashed in a reset")
        return row


gym.register("CrashingCartPole-v0", entry_point=CrashingCartPole, max_episode_steps=500)
