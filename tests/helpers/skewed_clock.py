"""CartPole on ranks whose clocks differ by an hour, where few lines may be logged."""

import os

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

from steadyrl.core import clock

clock.RateLimiter.__init__.__defaults__ = (3,)
if os.environ.get("RANK") == "1":
    seconds = clock.Stopwatch.seconds.fget
    clock.Stopwatch.seconds = property(lambda self: seconds(self) + 3600)

gym.register("Skewed-v0", entry_point=CartPoleEnv, max_episode_steps=100)
