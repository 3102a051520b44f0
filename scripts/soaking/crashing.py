"""Any environment, made to break every so many steps, as real simulators do.

env.id=scripts.soaking.crashing:Crashing-v0 env.kwargs='{base: CartPole-v1, every: 10_000}'
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym


class Crashing(gym.Wrapper):
    """Raise after so many steps; what is built in its place lives as long."""

    def __init__(self, env: gym.Env[Any, Any], every: int) -> None:
        super().__init__(env)
        self._left = every

    def step(self, action: Any) -> Any:
        """Step the environment, or break."""
        if not self._left:
            raise RuntimeError("the simulator crashed, as it was asked to")
        self._left -= 1
        return self.env.step(action)


def make(base: str, every: int, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make the environment called `base` so that it breaks."""
    return Crashing(gym.make(base, disable_env_checker=True, **kwargs), every)


gym.register("Crashing-v0", "scripts.soaking.crashing:make")
