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
