"""A wrapper of somebody's own."""

import gymnasium as gym


class Scaled(gym.RewardWrapper):
    def __init__(self, env, factor=2):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward


def nothing(env):
    return None
