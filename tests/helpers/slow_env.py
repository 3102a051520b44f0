"""An environment whose steps take long, found by `env.id=slow_env:Slow-v0`."""

import ctypes
import os
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

# Called with the interpreter's lock held: nothing of Python goes on meanwhile, signals neither.
LIBC = ctypes.PyDLL(None)


class Slow(gym.Env):
    """From the n-th step on every step takes so many seconds: in Python, or `stuck` in C.

    Each of these leaves a line in `file` when it begins.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds, file, after=0, stuck=False, forks=False):
        self.seconds, self.file, self.stuck = seconds, Path(file), stuck
        self.steps, self.after = 0, after
        if forks:
            self.fork()

    def fork(self):
        """Leave a process that gets a signal of its own, and nothing of it is meant for the run."""
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
        """Wait for a lock that this thread holds itself: signals end no such wait."""
        lock = ctypes.create_string_buffer(64)
        LIBC.pthread_mutex_lock(lock)
        seconds, rest = divmod(time.time() + self.seconds, 1)
        until = (ctypes.c_long * 2)(int(seconds), int(1e9 * rest))
        LIBC.pthread_mutex_timedlock(lock, until)


gym.register("Slow-v0", Slow)
