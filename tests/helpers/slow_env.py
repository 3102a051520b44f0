"""An environment with slow steps, for `env.id=slow_env:Slow-v0`."""

import ctypes
import os
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

# PyDLL keeps the GIL: no Python code runs during a call, signal handlers neither.
LIBC = ctypes.PyDLL(None)


class Slow(gym.Env):
    """From step `after` on, every step takes `seconds`: in Python or, with `stuck`, in C.

    Each slow step appends a line to `file` when it starts.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds, file, after=0, stuck=False, forks=False):
        self.seconds, self.file, self.stuck = seconds, Path(file), stuck
        self.steps, self.after = 0, after
        if forks:
            self.fork()

    def fork(self):
        """Fork a process that receives signals, which must not affect the run."""
        child = os.fork()
        if child == 0:
            time.sleep(1000)
            os._exit(0)
        os.kill(child, 15)
        time.sleep(0.1)
        os.kill(child, 9)
        os.waitpid(child, 0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps > self.after:
            with self.file.open("a") as file:
                file.write(f"{self.steps}\n")
            if self.stuck:
                self.wait_in_c()
            else:
                end = time.monotonic() + self.seconds
                while (left := end - time.monotonic()) > 0:
                    time.sleep(left)
        return np.zeros(2, np.float32), 1.0, False, False, {}

    def wait_in_c(self):
        """Wait for a mutex that this thread holds; signals do not interrupt it."""
        lock = ctypes.create_string_buffer(64)
        LIBC.pthread_mutex_lock(lock)
        seconds, rest = divmod(time.time() + self.seconds, 1)
        until = (ctypes.c_long * 2)(int(seconds), int(1e9 * rest))
        LIBC.pthread_mutex_timedlock(lock, until)


gym.register("Slow-v0", Slow)
