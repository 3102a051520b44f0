"""Make MinAtar's episodes independent of each other."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

ENTRY_POINT = "minatar.gym:BaseEnv"


class FreshStickyAction(gym.Wrapper[Any, Any, Any, Any]):
    """Forget the last action at a reset: a sticky first action would repeat the last episode's."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the game and the action that may stick."""
        observation, info = self.env.reset(**kwargs)
        game: Any = self.unwrapped
        game.game.last_action = 0
        return observation, info
