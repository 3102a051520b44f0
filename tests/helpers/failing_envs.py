"""Environments, wrappers and reward functions that raise two calls deep."""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

LEVELS = {}


def look_up(level="a level"):
    return LEVELS[level]  # FAILS HERE


class Failing(gym.Env):
    """Raises in `where` (init, reset, step); with `late`, from that step on."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, where="", late=0):
        self.where, self.late, self.steps = where, late, 0
        self.fail("init")

    def fail(self, where):
        if where == self.where and self.steps >= self.late:
            look_up()

    def fail_at_once(self, where):
        look_up()

    def import_nothing(self, where):
        import no_such_module  # noqa: F401

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.fail("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.fail("step")
        return np.zeros(2, np.float32), 1.0, self.steps % 5 == 0, False, {}


class FailingBatch(gym.vector.VectorEnv):
    """The same as a batched environment."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_observation_space, single_action_space = (
        Failing.observation_space,
        Failing.action_space,
    )

    def __init__(self, num_envs=1, where="", late=0):
        self.num_envs, self.where = num_envs, where
        self.observation_space = gym.vector.utils.batch_space(Failing.observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(Failing.action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        if self.where == "reset":
            look_up()
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions):
        look_up()


class FailingWrapper(gym.Wrapper):
    """Raises when built, or in a step."""

    def __init__(self, env, where):
        super().__init__(env)
        self.where = where
        if where == "init":
            look_up()

    def step(self, action):
        if self.where == "step":
            look_up()
        return super().step(action)


def rewarded(env):
    """Wrap an environment with a reward function that raises."""
    return gym.wrappers.TransformReward(env, lambda reward: look_up(reward))


gym.register("Failing-v0", Failing, vector_entry_point=FailingBatch)
