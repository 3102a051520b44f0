"""User-defined wrappers."""

import gymnasium as gym


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
