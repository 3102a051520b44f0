"""One Atari game with both the agent's observations and a full-size colour screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as GymSpec
from numpy.typing import NDArray

from steadyrl.core.errors import SettingError
from steadyrl.envs.registration import ATARI, find_spec, unknown_keyword
from steadyrl.envs.settings import EnvSettings

SEED_LIMIT = 2**31 - 1  # a larger seed turns negative in C++ and is then ignored
# ALE's keyword arguments that conflict with this backend → what to use instead.
RESERVED_KWARGS = {
    "game": "env.id names it",
    "stack_num": "use env.frame_stack",
    "reward_clipping": "the learner clips rewards, the score stays raw",
    "life_loss_info": "use episodic_life",
    "autoreset_mode": "environments reset on the step after an episode's end",
    "batch_size": "every step has all environments",
    "continuous": "actions are the buttons",
}
# What an id of the user's own may be registered with: ALE's vector environment takes it, too.
REGISTERED_KWARGS = (
    "game",
    "frameskip",
    "repeat_action_probability",
    "full_action_space",
    "max_num_frames_per_episode",
)
SCREEN = {"img_height": 210, "img_width": 160, "grayscale": False}
NTSC = 60  # frames per second


class AtariGame(gym.Env[NDArray[np.uint8], Any]):
    """The evaluation game and a copy in lockstep that renders the full-size screen.

    ALE's vector environment offers one or the other. Same seeds and actions: the same game.
    """

    render_mode = "rgb_array"

    def __init__(self, settings: EnvSettings) -> None:
        kwargs = ale_kwargs(settings) | {"num_threads": 1}
        kwargs.pop("episodic_life", None)
        self._games = [make_ale(settings, kwargs, 1), make_ale(settings, kwargs | SCREEN, 1)]
        space = self._games[0].single_observation_space
        self.observation_space = spaces.Box(0, 255, space.shape[1:], np.uint8)
        self.action_space = spaces.Discrete(int(self._games[0].single_action_space.n))
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": NTSC // int(kwargs.get("frameskip", 4)),
        }
        self._screen = np.zeros((210, 160, 3), np.uint8)
        buttons = [action.name for action in self._games[0].ale.get_action_set()]
        self._after_life = button_after_life(buttons, kwargs)
        self._continues, self._lives, self._new_life = settings.continues_after_life, 0, False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Reset both copies with this seed."""
        seeds = np.array([(seed or 0) % SEED_LIMIT])
        (seen, info), (shown, _) = (game.reset(seed=seeds) for game in self._games)
        self._screen, self._lives, self._new_life = shown[0, 0], int(info["lives"][0]), False
        return seen[0, 0], {}

    def step(self, action: Any) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Step both copies with the same action, after a lost life with FIRE as in evaluation."""
        if self._new_life:
            action = self._after_life
        seen, shown = (game.step(np.array([action])) for game in self._games)
        self._screen, lives = shown[0][0, 0], int(seen[4]["lives"][0])
        self._new_life, self._lives = self._continues and lives < self._lives, lives
        return seen[0][0, 0], float(seen[1][0]), bool(seen[2][0]), bool(seen[3][0]), {}

    def render(self) -> NDArray[np.uint8]:  # type: ignore[override]
        """Return the screen [210, 160, 3]."""
        return self._screen


def button_after_life(buttons: list[str], kwargs: Mapping[str, Any]) -> int:
    """Return the index of the button that continues the game after a lost life."""
    fire = kwargs.get("use_fire_reset", True) and "FIRE" in buttons
    return buttons.index("FIRE" if fire else "NOOP")


def ale_kwargs(settings: EnvSettings) -> dict[str, Any]:
    """Return a game's keyword arguments, with those of the registration if the id is the user's.

    ALE's ids give the game only: the rest are the defaults of its vector environment.
    """
    spec = find_spec(settings.id)
    if spec.entry_point != ATARI:
        raise SettingError("backend", settings.backend, f"{settings.id} is not an Atari game")
    game = spec.kwargs["game"]
    if _is_of_ale(spec, game):
        return {"game": game, **settings.kwargs}
    registered = {**spec.kwargs, "max_episode_steps": spec.max_episode_steps}
    for key, value in registered.items():
        if key not in REGISTERED_KWARGS and value is not None:
            taken = ", ".join(REGISTERED_KWARGS)
            reason = f"is registered with {key}={value!r}; Atari games take {taken}"
            raise SettingError("id", settings.id, reason)
    return {**spec.kwargs, **settings.kwargs}


def _is_of_ale(spec: GymSpec, game: str) -> bool:
    """Return whether ALE registered an id: ALE/Pong-v5, Pong-v4, PongNoFrameskip-v4."""
    name = game.title().replace("_", "")
    older = spec.name in (name, f"{name}NoFrameskip") and spec.version in (0, 4)
    return spec.namespace == "ALE" or (spec.namespace is None and older)


def make_ale(settings: EnvSettings, kwargs: dict[str, Any], num_envs: int) -> Any:
    """Make ALE's vector environment without frame stacking and reward clipping."""
    for key, reason in RESERVED_KWARGS.items():
        if key in settings.kwargs:
            raise SettingError(f"kwargs.{key}", settings.kwargs[key], f"cannot be set: {reason}")
    from ale_py.vector_env import AtariVectorEnv as AleVectorEnv

    try:
        return AleVectorEnv(num_envs=num_envs, stack_num=1, reward_clipping=False, **kwargs)
    except TypeError as error:
        if "incompatible function arguments" in str(error):  # followed by the C++ signature
            reason = "one of the values has a type that ALE does not accept"
            raise SettingError("kwargs", settings.kwargs, reason) from None
        raise unknown_keyword(settings, error) or error from None
