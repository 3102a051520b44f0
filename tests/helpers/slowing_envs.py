"""Environments and callbacks that become slower, for `env.id=slowing_envs:Slowing-v0`."""

import multiprocessing
import time

import gymnasium as gym
import numpy as np

from steadyrl.agents.learner.learner import Learner
from steadyrl.training.callbacks.callback import Callback

AFTER = 25.0  # seconds until learning and callbacks become slower
WAIT = 0.03  # seconds: much more than anything takes on a busy machine


class Slowing(gym.Env):
    """Episodes of 50 steps, which wait `seconds` each once `after` seconds have passed.

    With `growth`, the wait grows over so many seconds. With `worker`, only the environment in the
    process of this name waits.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds=0.0, after=0.0, growth=0.0, worker=None):
        self._seconds, self._after, self._growth = seconds, after, growth
        self._count, self._begin = 0, time.monotonic()
        if worker not in (None, multiprocessing.current_process().name):
            self._seconds = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self._count += 1
        late = time.monotonic() - self._begin - self._after
        if late > 0 and self._seconds:
            time.sleep(self._seconds * (min(1.0, late / self._growth) if self._growth else 1.0))
        return np.zeros(4, np.float32), 1.0, self._count % 50 == 0, False, {}


gym.register("Slowing-v0", Slowing)


class SlowCallback(Callback):
    """Waits at every step, after a while."""

    def on_start(self, run):
        self._begin = time.monotonic()

    def on_step(self, run):
        if time.monotonic() - self._begin > AFTER:
            time.sleep(WAIT)


class SlowLearning(Callback):
    """Makes gradient steps of this process wait, after a while."""

    def on_start(self, run):
        begin, step = time.monotonic(), Learner.step

        def slow_step(*arguments, **named):
            if time.monotonic() - begin > AFTER:
                time.sleep(WAIT)
            return step(*arguments, **named)

        Learner.step = slow_step
