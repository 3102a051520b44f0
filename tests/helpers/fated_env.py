"""CartPole that, depending on a number, works, diverges, fails, or kills its process once.

The kill waits until the checkpoint of step 500 is complete, so that the run resumes from it.
"""

import os
import signal
from pathlib import Path

import gymnasium as gym

DIVERGES, KILLED, FAILS = 0.92, 0.93, 0.95


class Fated(gym.Wrapper):
    def __init__(self, env, number, mark):
        super().__init__(env)
        self._number, self._last = number, Path(mark)
        self._steps = 0

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self._steps += 1
        if self._number == DIVERGES and self._steps > 200:
            reward = float("nan")
        if self._number == FAILS and self._steps > 200:
            raise RuntimeError("fated to fail")
        if self._number == KILLED and self._steps > 700 and not self._last.exists():
            saved = f"all/*{KILLED}*/checkpoints/step-{500:012d}"
            if any(self._last.parent.glob(saved)):
                self._last.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return obs, reward, terminated, truncated, info


def make(number, mark, **kwargs):
    return Fated(gym.make("CartPole-v1", **kwargs), number, mark)


gym.register("Fated-v0", "fated_env:make")
