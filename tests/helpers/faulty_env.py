"""CartPole with a fault on one rank after some steps: hang, exception, full disk, …"""

import ctypes
import os
import resource
import signal
import time

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

from steadyrl.training.checkpoints.saver import Saver

RANK = int(os.environ.get("RANK", "0"))


def no_memory(self, step):
    raise MemoryError("no memory for the state")


class Faulty(CartPoleEnv):
    """After `after` steps on rank `on`: `hang`, `fail`, or `disk` (no more writes).

    `memory`: SIGTERM, and no memory for what is saved then. `gil`: holds the GIL for 8 seconds.
    """

    def __init__(self, fault="", on=1, after=300, busy=0.0):
        super().__init__()
        self.fault = fault if on == RANK else ""
        self.left, self.busy = after, busy

    def step(self, action):
        self.left -= 1
        if self.left == 0:
            if self.fault == "hang":
                time.sleep(1000)
            if self.fault == "fail":
                raise RuntimeError("the pole fell on the floor")
            if self.fault == "disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            if self.fault == "memory":
                signal.raise_signal(signal.SIGTERM)
                Saver._validate_finite = no_memory
            if self.fault == "gil":
                ctypes.PyDLL(None).sleep(8)
        end = time.perf_counter() + self.busy
        while time.perf_counter() < end:
            pass
        return super().step(action)


gym.register("Faulty-v0", Faulty, max_episode_steps=500)
