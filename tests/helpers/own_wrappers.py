"""User-defined wrappers."""

import gymnasium as gym
import numpy as np


class Scaled(gym.RewardWrapper):
    def __init__(self, env, factor=2):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward


def nothing(env):
    return None


class Fused(gym.Wrapper):
    """Fails in its second step, and once while it is rebuilt; the file counts constructions."""

    def __init__(self, env, fuse: str, before: int):
        super().__init__(env)
        with open(fuse, "ab") as file:
            self._built = file.tell() - before
            file.write(b"x")
        self._steps = 0
        if self._built == 0:
            raise RuntimeError("cannot be built now")

    def step(self, action):
        self._steps += 1
        if self._built == -1 and self._steps == 2:
            raise RuntimeError("broken")
        return super().step(action)


class Only(gym.ObservationWrapper):
    """Observes some elements only, for example to hide velocities."""

    def __init__(self, env, indices):
        super().__init__(env)
        self.indices = list(indices)
        space = env.observation_space
        bounds = (bound[self.indices] for bound in (space.low, space.high))
        self.observation_space = gym.spaces.Box(*bounds, dtype=space.dtype)

    def observation(self, observation):
        return observation[self.indices]


class Sized(gym.Wrapper):
    """Takes a tuple, a list and a text, and nothing else."""

    def __init__(self, env, shape: tuple[int, ...] = (), names=None, place: str = ""):
        super().__init__(env)
        assert (type(shape), type(names), type(place)) == (tuple, list, str)
        assert all(type(size) in (int, tuple) for size in shape)


class Offset(gym.RewardWrapper):
    """Takes an array."""

    def __init__(self, env, by: np.ndarray = None):
        super().__init__(env)
        self.by = by

    def reward(self, reward):
        return reward + float(self.by.sum())


def negated(reward):
    return -reward


MARKED = gym.spaces.Box(-9, 9, (4,))


def marked(obs):
    return obs * 0 + 7
