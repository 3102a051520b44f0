"""An environment that draws with MuJoCo's own renderer, as many outside of Gymnasium do."""

from typing import ClassVar

import gymnasium as gym
import mujoco
import numpy as np

BALL = "<mujoco><worldbody><light pos='0 0 9'/><geom size='1'/></worldbody></mujoco>"


class Ball(gym.Env):
    """A ball; episodes have 3 steps."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 25}
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.model = mujoco.MjModel.from_xml_string(BALL)
        self.data = mujoco.MjData(self.model)
        mujoco.mj_forward(self.model, self.data)
        self.renderer = None if render_mode is None else mujoco.Renderer(self.model, 64, 64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == 3, False, {}

    def render(self):
        self.renderer.update_scene(self.data)
        return self.renderer.render()


gym.register("Ball-v0", Ball)
