"""Environments that render: in their own window, or recorded to a file."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator
from gymnasium.wrappers import HumanRendering

from steadyrl.core.errors import SettingError, describe, one_line, with_place
from steadyrl.envs.faults import FILM
from steadyrl.envs.registration import ATARI, find_spec, make_env
from steadyrl.envs.rendering.atari import AtariGame
from steadyrl.envs.rendering.video import PreviewWriter, VideoWriter
from steadyrl.envs.settings import RenderSettings

# Environment variables for rendering without a display; the user's own values take precedence.
HEADLESS = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}
if sys.platform != "darwin":  # macOS has no EGL, and MuJoCo draws there without a window by itself
    HEADLESS["MUJOCO_GL"] = "egl"
# Modules that read MUJOCO_GL when imported: of MuJoCo from 4.0 on, and of all versions.
MUJOCO_MODULES = ("mujoco.rendering.classic.gl_context", "mujoco.gl_context")
# Errors of constructors that refuse a render mode: many assert it.
REFUSALS = (
    AssertionError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
    gym.error.Error,
)
FPS = 30  # of environments without render_fps
Result = tuple[Any, Any, bool, bool, dict[str, Any]]


def make_render_env(settings: RenderSettings) -> gym.Env[Any, Any]:
    """Make one environment that renders to a window, or is recorded to a video file.

    Runs in a process of its own, whose environment variables select headless rendering.
    """
    if settings.video is None:
        return WindowedEnv(_drawing(settings, "human"), settings.id)
    draws_by_egl = "MUJOCO_GL" in HEADLESS and "MUJOCO_GL" not in os.environ
    for name, value in HEADLESS.items():
        os.environ.setdefault(name, value)
    for name in MUJOCO_MODULES:
        if draws_by_egl and name in sys.modules:  # imported before this process was forked
            with suppress(ImportError, AttributeError, RuntimeError):  # an environment's that draws
                importlib.reload(sys.modules[name])
    return RecordedEnv(_drawing(settings, "rgb_array"), settings)


def _drawing(settings: RenderSettings, mode: str) -> gym.Env[Any, Any]:
    if find_spec(settings.id).entry_point == ATARI:
        game = AtariGame(settings)
        return HumanRendering(game) if mode == "human" else game
    try:
        return make_env(settings, mode)
    except REFUSALS as error:
        modes = _declared_modes(settings.id)
        lacks = bool(modes) and mode not in modes
        if isinstance(error, SettingError) or not (lacks or "render" in str(error)):
            raise
        reason = f"cannot render: it cannot be made with render_mode={mode!r}"
        declared = f", it has {' and '.join(map(repr, modes))}" if modes else ""
        raise SettingError("id", settings.id, reason + declared) from error


def _declared_modes(env_id: str) -> list[Any]:
    """Return the render modes in the metadata of an environment's class."""
    entry = find_spec(env_id).entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    declared = getattr(creator, "metadata", None)
    modes = declared.get("render_modes") if isinstance(declared, Mapping) else None
    return list(modes or ())


class WindowedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Raises SettingError at the first reset if the environment cannot open its window."""

    def __init__(self, env: gym.Env[Any, Any], env_id: str) -> None:
        super().__init__(env)
        self._id = env_id
        self._open = False

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset and render the first frame."""
        if self._open:
            return self.env.reset(**kwargs)
        try:
            result = self.env.reset(**kwargs)
            self.env.render()
        except Exception as error:  # SDL, GLFW and GL have their own exceptions
            raise SettingError("id", self._id, f"opens no window: {with_place(error)}") from error
        if no_display():
            raise SettingError("id", self._id, "opens no window: the display does not answer")
        self._open = True
        return result


def no_display() -> bool:
    """Return whether SDL fell back to a driver without a window although none was requested."""
    pygame: Any = sys.modules.get("pygame")
    if pygame is None or not pygame.display.get_init() or "SDL_VIDEODRIVER" in os.environ:
        return False
    return pygame.display.get_driver() in ("dummy", "offscreen")


class RecordedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Records the first episodes, one frame per observation; the file is complete after the last.

    An episode counts as ended when it ends, or after `max_episode_steps`.
    """

    def __init__(self, env: gym.Env[Any, Any], settings: RenderSettings) -> None:
        super().__init__(env)
        assert settings.video is not None
        self._id, self._path = settings.id, settings.video
        fps = (env.metadata or {}).get("render_fps") or FPS
        self._writers: list[VideoWriter | PreviewWriter] = [VideoWriter(settings.video, fps=fps)]
        if settings.preview is not None:
            self._writers.append(PreviewWriter(settings.preview, fps=fps))
        self._left, self._limit = settings.video_episodes, settings.max_episode_steps
        self._steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset and record the first frame."""
        result = self.env.reset(**kwargs)
        self._steps = 0
        self._capture()
        return result

    def step(self, action: Any) -> Result:
        """Step and record a frame; close the file after the last episode."""
        result = self.env.step(action)
        self._steps += 1
        self._capture()
        if result[2] or result[3] or self._steps == self._limit:
            self._left -= 1
            if self._left == 0:
                self._finish()
        return result

    def _capture(self) -> None:
        if self._left > 0:
            try:
                picture = self.env.render()
            except NotImplementedError as error:  # Gymnasium's own has no text
                why = one_line(str(error)) or "it has no render()"
                raise SettingError("id", self._id, f"cannot render: {why}") from error
            if picture is None:
                raise SettingError("id", self._id, "cannot render: render() returned None")
            with self._disk_errors():
                for film in self._writers:
                    film.add(picture)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Raise SettingError for a film that cannot be written: the environment has not failed."""
        try:
            yield
        except OSError as error:
            reason = f"cannot be written: {error.strerror or describe(error)}"
            raise SettingError(FILM, self._path, reason) from error

    def _finish(self) -> None:
        with self._disk_errors(), ExitStack() as closed:
            for film in self._writers:
                closed.callback(film.close)

    def close(self) -> None:
        """Remove the file if an episode is missing, and close the environment."""
        for film in self._writers:
            film.discard()
        self.env.close()
