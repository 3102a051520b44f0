"""CartPole that kills its trainer once, or always fails, while the third video frame is rendered.

The first waits for a checkpoint in progress, so that the one of this step is complete.
"""

import os
import signal
from pathlib import Path

import gymnasium as gym

from steadyrl.training.checkpoints.archive import TEMPORARY


class Filmed(gym.Wrapper):
    def __init__(self, env, mark):
        super().__init__(env)
        self._last, self._pictures = Path(mark), 0

    def render(self):
        self._pictures += 1
        if self._pictures == 3 and not self._last.exists():
            self._last.touch()
            while any(self._last.parent.glob(f"run/checkpoints/{TEMPORARY}*")):
                os.sched_yield()
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()  # until the kernel kills this process too: it would remove its file
        return super().render()


def make(mark, **kwargs):
    return Filmed(gym.make("CartPole-v1", **kwargs), mark)


class Torn(gym.Wrapper):
    """Fails as `fault` says."""

    def __init__(self, env, fault):
        super().__init__(env)
        self._fault, self._pictures = fault, 0

    def render(self):
        self._pictures += 1
        if self._pictures == 3 and self._fault == "render":
            raise RuntimeError("the film is torn")
        return super().render()

    def step(self, action):
        observation, reward, *rest = super().step(action)
        failed = self._pictures >= 3 and self._fault == "reward"
        return observation, float("nan") if failed else reward, *rest


def make_torn(fault, **kwargs):
    return Torn(gym.make("CartPole-v1", **kwargs), fault)


gym.register("Torn-v0", "filmed_env:make_torn")
gym.register("Filmed-v0", "filmed_env:make")
