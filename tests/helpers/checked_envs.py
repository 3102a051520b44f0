"""Environments with one fault each, for `steadyrl envs check checked_envs:NAME-v0`."""

import os
import signal
import subprocess
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Fine(gym.Env):
    """Follows the interface: 9 steps, seeded observations."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)
    length = 9

    def observation(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observation(), {}

    def step(self, action):
        self.time += 1
        return self.observation(), 1.0, self.time >= self.length, False, {}


class Unseeded(Fine):
    """Draws from NumPy's global generator."""

    def observation(self):
        return np.random.uniform(-1, 1, 3).astype(np.float32)


class Carried(Fine):
    """An episode's rewards depend on how many there were before."""

    begun = 0

    def reset(self, **kwargs):
        self.begun += 1
        return super().reset(**kwargs)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(self.begun), *rest


class Endless(Fine):
    """Has no time limit."""

    length = 10**9


class Outside(Fine):
    """Its observations leave their space after a while."""

    def observation(self):
        return super().observation() + np.float32(9 * (getattr(self, "time", 0) > 5))


class Restarted(Fine):
    """Only its resets after the first return what is outside of the space."""

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        self.begun = getattr(self, "begun", 0) + 1
        return observation + np.float32(9 * (self.begun > 1)), info


class Reusing(Fine):
    """Writes the observations of an episode into one array."""

    def reset(self, **kwargs):
        self.array = np.zeros(3, np.float32)
        return super().reset(**kwargs)

    def observation(self):
        self.array[:] = super().observation()
        return self.array


class ReusingInfo(Fine):
    """Returns the same dict every time."""

    def __init__(self):
        self.info = {}

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], self.info

    def step(self, action):
        return *super().step(action)[:4], self.info


class Flags(Fine):
    """Returns NumPy's booleans, as comparisons of arrays give them."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, np.bool_(terminated), np.bool_(truncated), info


class Unrewarded(Fine):
    """Returns no number as a reward, after the steps that Gymnasium's checker takes."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, None if self.time > 5 else reward, *rest


class Boxed(Fine):
    """Its reward becomes an array of one element."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.array([1.0]) if self.time > 5 else reward, *rest


class Tensored(Fine):
    """Its reward becomes a tensor of one element."""

    def step(self, action):
        import torch

        observation, reward, *rest = super().step(action)
        return observation, torch.ones(1) if self.time > 5 else reward, *rest


class Undefined(Fine):
    """Its reward becomes NaN."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, float("nan") if self.time > 5 else reward, *rest


class Numbered(Fine):
    """Returns 0 and 1 for `terminated`."""

    def step(self, action):
        observation, reward, terminated, *rest = super().step(action)
        return observation, reward, int(terminated), *rest


class Spoken(Fine):
    """Returns a text for `terminated`, which would be true."""

    def step(self, action):
        observation, reward, _, *rest = super().step(action)
        return observation, reward, "False", *rest


class Doubles(Fine):
    """Its observations are of a wider type than its space."""

    def observation(self):
        return super().observation().astype(np.float64)


class Raising(Fine):
    """Has a bug."""

    def step(self, action):
        if self.time == 6:
            raise KeyError("goal")
        return super().step(action)


class Crashing(Fine):
    """Kills its process."""

    def step(self, action):
        if self.time == 6:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(action)


class Hanging(Fine):
    """Does not come back."""

    def step(self, action):
        if self.time == 6:
            time.sleep(600)
        return super().step(action)


class Serving(Fine):
    """Starts programs, one of them in a session of its own, and ends none."""

    def __init__(self, file=None):
        for own in (False, True):
            program = subprocess.Popen(["sleep", "600"], start_new_session=own)
            with open(file, "a") as pids:
                pids.write(f"{program.pid}\n")


class Interrupting(Fine):
    """Sends Ctrl-C to the program that checks it, and does not come back."""

    def __init__(self, file=None):
        self.file = file

    def step(self, action):
        if self.time == 6:
            with open(self.file, "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(600)
        return super().step(action)


class Parts(Fine):
    """Has observations of several parts."""

    observation_space = spaces.Dict(
        {"place": spaces.Box(-1, 1, (3,), np.float32), "zone": spaces.Discrete(4)}
    )

    def observation(self):
        return {"place": super().observation(), "zone": self.np_random.integers(4)}


class Lost(Parts):
    """Its zone leaves its space after a while."""

    def observation(self):
        return super().observation() | {"zone": 4 * (getattr(self, "time", 0) > 5)}


class Film(Fine):
    """Has images, channels last."""

    observation_space = spaces.Box(0, 255, (12, 16, 3), np.uint8)

    def observation(self):
        return self.np_random.integers(0, 256, (12, 16, 3), np.uint8)


class Wide(Film):
    """Its images are of a wider type than their space."""

    def observation(self):
        return super().observation().astype(np.int64)


class Bright(Wide):
    """Its images leave their space after a while."""

    def observation(self):
        return super().observation() + 9 * (getattr(self, "time", 0) > 5)


for kind in (
    *(
        Fine,
        Unseeded,
        Carried,
        Endless,
        Outside,
        Restarted,
        Reusing,
        ReusingInfo,
        Flags,
        Unrewarded,
        Boxed,
        Tensored,
        Spoken,
        Doubles,
        Undefined,
        Numbered,
        Raising,
    ),
    *(Crashing, Hanging, Serving, Interrupting, Parts, Lost, Film, Wide, Bright),
):
    gym.register(f"{kind.__name__}-v0", kind)


class Doubled(gym.RewardWrapper):
    """A plain wrapper, as users write them."""

    def reward(self, reward):
        return 2 * reward
