"""Misbehaving environments, for `env.id=broken_envs:Name-v0`."""

import contextlib
import gc
import os
import resource
import signal
import sys
import time

import gymnasium as gym
import numpy as np


class Bad(gym.Env):
    """Returns a non-finite reward or observation after some steps of every episode."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, reward=1.0, observation=0.0, after=40):
        self.bad = (reward, observation)
        self.after = after

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        reward, value = self.bad if self.time > self.after else (1.0, 0.0)
        return np.full(2, value, np.float32), reward, self.time >= 50, False, {}


gym.register("Bad-v0", Bad)


class Lottery(gym.Wrapper):
    """CartPole with random rewards: nothing can be learned."""

    def step(self, action):
        observation, _, terminated, truncated, info = self.env.step(action)
        reward = float(self.np_random.normal())
        return observation, reward, terminated, truncated, info


def lottery():
    """Return the environment with a single time-limit wrapper."""
    return Lottery(gym.make("CartPole-v1"))


gym.register("LongLottery-v0", lottery)


class Hoarder(Bad):
    """Leaks `size` bytes per step."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.kept = []

    def step(self, action):
        self.kept.append(b"\1" * self.size)
        return super().step(action)


gym.register("Hoarder-v0", Hoarder)


class Wanderer(Bad):
    """Changes the working directory when built and at every reset."""

    def __init__(self, to):
        super().__init__()
        self.to = to
        os.chdir(to)

    def reset(self, *, seed=None, options=None):
        os.chdir(self.to)
        return super().reset(seed=seed)


gym.register("Wanderer-v0", Wanderer)


class Signaller(Bad):
    """Sends signals to its own process, so many seconds apart, when built or in its n-th step.

    `fails`: it fails there itself, as a simulator that the signal has ended. `upwards`: its process
    is a worker, and the trainer gets them too.
    """

    def __init__(self, signals, made=False, step=0, apart=0.0, fails=False, upwards=False):
        super().__init__()
        self.signals, self.left, self.apart, self.fails = signals, step, apart, fails
        self.upwards = upwards
        if made:
            try:
                self.send()
            finally:
                if self.fails:
                    raise ConnectionError("the simulator has ended")

    def send(self):
        for i, number in enumerate(self.signals):
            if i and self.apart:
                time.sleep(self.apart)
            if self.upwards:
                os.kill(os.getppid(), number)
            os.kill(os.getpid(), number)

    def step(self, action):
        self.left -= 1
        if self.left == 0:
            self.send()
            if self.fails:
                raise ConnectionError("the simulator has ended")
        return super().step(action)


class Taker(Signaller):
    """Handles SIGTERM itself, from each reset on; episodes have 50 steps."""

    def reset(self, *, seed=None, options=None):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        return super().reset(seed=seed)

    def step(self, action):
        observation, reward, *_, info = super().step(action)
        return observation, reward, self.left % 50 == 0, False, info


class StepTaker(Bad):
    """Handles SIGTERM itself from its 300th step on, and sends it once that is undone.

    Its episode does not end.
    """

    def __init__(self):
        super().__init__()
        self.steps = 0

    def own(self, *_):
        sys.exit(0)

    def step(self, action):
        self.steps += 1
        if self.steps == 300:
            signal.signal(signal.SIGTERM, self.own)
        elif self.steps > 300 and signal.getsignal(signal.SIGTERM) != self.own:
            os.kill(os.getpid(), signal.SIGTERM)
        observation, reward, *_, info = super().step(action)
        return observation, reward, False, False, info


class AlarmTaker(Bad):
    """Handles SIGALRM, as for timeouts of its own; hangs in its 300th step, after SIGTERM."""

    def __init__(self):
        super().__init__()
        self.left = 300
        signal.signal(signal.SIGALRM, lambda *_: None)

    def step(self, action):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)
        return super().step(action)


gym.register("StepTaker-v0", StepTaker)
gym.register("AlarmTaker-v0", AlarmTaker)
gym.register("Signaller-v0", Signaller)
gym.register("Taker-v0", Taker)


class Diary(Bad):
    """Leaks a kilobyte per episode of one step."""

    def __init__(self):
        super().__init__()
        self.size = 1024  # not a constant, which would be one shared object
        self.pages = []

    def step(self, action):
        self.pages.append(b"\1" * self.size)
        observation, reward, *_, info = super().step(action)
        return observation, reward, True, False, info


gym.register("Diary-v0", Diary)


class Litter(Bad):
    """Makes `size` bytes of garbage in a reference cycle per step, and never collects it."""

    def __init__(self, size):
        super().__init__()
        gc.disable()
        self.size = size

    def step(self, action):
        cycle = [bytearray(os.urandom(4096) * (self.size // 4096))]
        cycle.append(cycle)
        return super().step(action)


gym.register("Litter-v0", Litter)


class GraphKeeper(Bad):
    """Leaks a tensor with its autograd graph per episode."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def reset(self, *, seed=None, options=None):
        import torch

        self.kept.append(torch.ones(3, requires_grad=True) * 2)
        return super().reset(seed=seed)


gym.register("GraphKeeper-v0", GraphKeeper)


class Computing(Bad):
    """Computes with torch in each step, enough for several threads."""

    def step(self, action):
        import torch

        torch.ones(300_000).sin_().sum()
        return super().step(action)


gym.register("Computing-v0", Computing)


class Glutton(Bad):
    """Takes all file descriptors for some steps, then releases them."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last
        self.steps = 0
        self.taken = []

    def step(self, action):
        self.steps += 1
        if self.steps == self.first:
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            with contextlib.suppress(OSError):
                while True:
                    self.taken.append(os.dup(0))
        elif self.steps == self.last:
            for descriptor in self.taken:
                os.close(descriptor)
        return super().step(action)


gym.register("Glutton-v0", Glutton)
