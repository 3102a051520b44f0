"""CartPole, and a callback, that keep so many MB a second as the environment variables say."""

import os
import time

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

from steadyrl.training.callbacks.callback import Callback

RATE = 1e6 * float(os.environ.get("LEAK_MB_PER_SECOND", "0"))
PLACE = os.environ.get("LEAK_IN", "")
START = int(1e6 * float(os.environ.get("LEAK_MB_AT_START", "0")))


class Leak:
    """Keeps fresh pages, as many as the time since the last call is worth."""

    def __init__(self, place):
        self.rate = RATE if place == PLACE else 0.0
        self.kept = [np.ones(START, np.uint8)] if self.rate else []
        self.last, self.owed = time.monotonic(), 0.0

    def __call__(self):
        now = time.monotonic()
        # A pause, such as compiling, is not the leak's.
        self.owed += min(now - self.last, 0.5) * self.rate
        self.last = now
        if self.owed >= 4096:
            self.kept.append(np.ones(int(self.owed), np.uint8))
            self.owed = 0.0


class LeakingEnv(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.wrappers.TimeLimit(CartPoleEnv(), 500))
        self.leak = Leak("environment")

    def step(self, action):
        self.leak()
        return super().step(action)


class LeakingEvaluationEnv(LeakingEnv):
    """Leaks, and ends no episode, in evaluations alone: the third of a process, with one to train.

    The first is the one that is asked for its spaces.
    """

    made = 0

    def __init__(self):
        super().__init__()
        LeakingEvaluationEnv.made += 1
        self.evaluates = self.made > 2

    def step(self, action):
        if not self.evaluates:
            return self.env.step(action)
        obs, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            obs, info = self.reset()
        return obs, reward, False, False, info


class LeakingCallback(Callback):
    def __init__(self):
        self.leak = Leak("callback")

    def on_step(self, run):
        self.leak()


gym.register("Leaking-v0", LeakingEnv)
gym.register("LeakingEvaluation-v0", LeakingEvaluationEnv)
