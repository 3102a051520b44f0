"""One environment: seeded episodes, next-step autoreset, encoded frames, decoded actions.

Its first steps, and one now and then, are checked against Gymnasium's API. Tolerable violations are
logged once as a warning; others raise an EnvironmentFailedError, which rebuilding would not fix.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import traceback
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.passive_env_checker import (
    env_reset_passive_checker,
    env_step_passive_checker,
)
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from numpy.typing import NDArray

from steadyrl.core.errors import NonFiniteError, SettingError, describe, one_line
from steadyrl.core.user_frames import defining_frame, is_foreign, shown_frames
from steadyrl.envs.encoding.description import describe_spaces, space_text
from steadyrl.envs.encoding.masks import (
    MASK_KEY,
    InvalidMaskError,
    find_masks,
    mask_encoder,
    require_masks,
)
from steadyrl.envs.encoding.spaces import encoders
from steadyrl.envs.encoding.statistics import read_info
from steadyrl.envs.encoding.step_buffer import StepBuffer
from steadyrl.envs.registration import ATARI, NOT_ATARI, FreshStickyAction, make_env
from steadyrl.envs.rendering.render import make_render_env
from steadyrl.envs.settings import EnvSettings, ImageSettings, RenderSettings
from steadyrl.envs.types import EnvironmentFailedError, EnvSpec, Watch

log = logging.getLogger("steadyrl")
Warn = Callable[[str], None]

FIRST_STEPS = 10
MAX_WARNINGS = 20  # a message with a changing number in it would be logged at every step
GYM_WRAPPERS = (OrderEnforcing, TimeLimit, FreshStickyAction)  # added by make_env
RESULTS = {
    "reset": "(observation, info)",
    "step": "(observation, reward, terminated, truncated, info)",
}
OLD_STEP = ": Gymnasium has two flags in place of done"
RESET_LACKS_MASK = (
    f"info[{MASK_KEY!r}] comes from step() but not from reset(): masks are ignored, all actions "
    "count as allowed; return it from reset() too"
)
LARGEST_SIGNED = 2**31 - 1
SEEDED = "Gymnasium's is reset(self, *, seed=None, options=None)"
# Python's messages for `a, b = result`; whichever number is known is in a group.
NOT_UNPACKED = re.compile(
    r"(?:not enough|too many) values to unpack \(expected \d(?:, got (\d+))?\)"
    r"|cannot unpack non-iterable (\w+) object"
)


def episode_seed(seed: int, env: int, episode: int) -> int:
    """Derive the seed of one episode of one environment, so that it can be replayed alone."""
    return int(np.random.SeedSequence([seed, env, episode]).generate_state(1)[0])


def seeded_reset(env: Any, seed: int) -> Any:
    """Reset with a seed of 32 bits, or its lower 31 where C++ code takes signed numbers only."""
    try:
        return env.reset(seed=seed)
    except (TypeError, OverflowError):
        if seed <= LARGEST_SIGNED:
            raise
    return env.reset(seed=seed & LARGEST_SIGNED)


class SingleEnv:
    """One of N environments; can be rebuilt after a failure and replayed after a resume."""

    def __init__(
        self, settings: EnvSettings, *, seed: int, index: int, warn: Warn | None = None
    ) -> None:
        self.seed = seed
        self.index = index
        self.episode = -1  # number of the running episode
        self.needs_reset = True  # the next step is a reset
        self.remarks: list[str] = []  # as `find_masks`'
        self._settings = settings
        self._warn = warn  # if given, first steps are checked and warnings go here
        self._env: gym.Env[Any, Any] | None = None
        self._seen: Watch | None = None
        self._checks: _FirstSteps | None = None

    def build(self) -> None:
        """Build the environment, closing the previous one."""
        self.close()
        settings = self._settings
        env = (
            make_render_env(settings)
            if isinstance(settings, RenderSettings)
            else make_env(settings)
        )
        if env.spec is not None and env.spec.entry_point == ATARI:
            raise SettingError("backend", self._settings.backend, NOT_ATARI)
        if self._warn is not None:
            env, self._checks = check_first_steps(env, self._warn)
        self.remarks = []
        masks = find_masks(env, settings, self.remarks.append)
        if self._checks is not None:
            maskable = isinstance(env.action_space, gym.spaces.Discrete)
            maskable = maskable and settings.action_masks == "auto"
            self._checks.masks_ignored = maskable and masks is None
        self._observations = env.observation_space  # with the mask, if it is in there
        self._env = env = env if masks is None else masks
        spaces = env.observation_space, env.action_space
        images = images_of(env, settings)
        beside_mask = masks is not None and masks.splits_observation
        self.encoder, self.decoder = encoders(settings.id, *spaces, images, beside_mask=beside_mask)
        self._axes = images.axes
        self.spaces = " and ".join(map(space_text, spaces))
        if self._warn is not None:
            self._warn(self.encoder.remark)
        self._step = self._env.step
        self._write = self.encoder.write
        env.action_space.seed(0)
        self.sample_action: Callable[[], Any] = env.action_space.sample
        if masks is not None:
            self.encoder = mask_encoder(self.encoder, masks.actions)
            self._write, self.sample_action = self.encoder.write, masks.sample_action
            self.spaces += f", masked by {masks.source}"
        require_masks(settings, self.spec())
        if self._seen is not None:
            self.watch(self._seen)

    def watch(self, seen: Watch) -> None:
        """Call `seen` with each observation before it is encoded; with a mask, with the pair."""
        assert self._env is not None
        self._seen, write, space = seen, self.encoder.write, self._env.observation_space

        def watched(observation: Any, frame: NDArray[Any]) -> None:
            write(observation, frame)  # refuses what is no observation
            seen(observation, space, self.index)

        self._write = watched

    def spec(self) -> EnvSpec:
        """Return the environment's spec."""
        settings = self._settings
        return EnvSpec.of(settings, self.encoder, self.decoder.spec)

    def described_spaces(self) -> dict[str, Any] | None:
        """Describe the environment's own spaces; None: not possible."""
        assert self._env is not None
        return describe_spaces(self._observations, self._env.action_space, self._axes)

    def name_code(self, error: BaseException, method: str | None = None) -> None:
        """Let the error of a wrong result show where user code defines what returned it."""
        if isinstance(error, InvalidMaskError):
            method = error.method or method
        elif not isinstance(error, EnvironmentFailedError | NonFiniteError):
            return
        if not shown_frames(error):
            error.user_frames = self.code_of(method or ("reset" if self.needs_reset else "step"))

    def code_of(self, method: str) -> tuple[str, ...]:
        """Return the lines where user code defines a method, of wrappers and environment."""
        layer: Any = self._env
        lines = defining_frame(getattr(type(layer), method, None))
        while isinstance(layer, gym.Wrapper):
            layer = layer.env
            lines += defining_frame(getattr(type(layer), method, None))
        return tuple(dict.fromkeys(lines))

    def check_next_step(self) -> None:
        """Check the next step as the first ones, but only warn: its environment has worked."""
        if self._checks is not None:
            self._checks.check_next()

    def force_reset(self, episode: int) -> None:
        """Make the next step a reset that starts the episode after `episode`."""
        self.episode = episode
        self.needs_reset = True

    def start(self, frame: NDArray[Any]) -> None:
        """Start the next episode and write its first frame."""
        if self._env is None:
            raise RuntimeError("the environment is closed")
        self.episode += 1
        seed = episode_seed(self.seed, self.index, self.episode)
        try:
            observation, _ = seeded_reset(self._env, seed)
        except (TypeError, ValueError) as error:
            raise_if_wrong("reset", error)
            raise
        self._encode(observation, frame)
        self.needs_reset = False

    def advance(self, action: Any, out: StepBuffer) -> None:
        """Step with a decoded action, or reset if the episode has ended; write the outcome."""
        index = self.index
        frame = out.frames[index]
        if self.needs_reset:
            self.start(frame)
            out.set_reset(index)
            return
        reward: Any
        try:
            observation, reward, terminated, truncated, info = self._step(action)
        except (TypeError, ValueError) as error:
            raise_if_wrong("step", error)
            raise
        try:  # not by a call, which every step would pay for
            self._write(observation, frame)
        except (TypeError, ValueError) as error:
            raise wrong_type(error) from error
        try:  # NumPy would convert text to a number, None to NaN and a tensor of one element
            if type(reward) is not float and getattr(reward, "ndim", False):
                raise TypeError("an array")
            out.reward[index] = reward + 0.0
        except (TypeError, ValueError):
            raise wrong_type(TypeError(describe_wrong_reward(reward))) from None
        except (FloatingPointError, RuntimeWarning):  # beyond float32, where overflows are errors
            out.reward[index] = math.copysign(math.inf, reward)
        try:
            over = bool(terminated or truncated)
        except ValueError as error:  # arrays of several
            raise wrong_type(error) from error
        if over:
            self._end_episode((terminated, truncated), info, out)
        out.terminated[index] = terminated
        out.truncated[index] = truncated
        out.valid[index] = True

    def _end_episode(self, flags: tuple[Any, Any], info: Any, out: StepBuffer) -> None:
        """Read the numbers that an episode's end reports; the next step is a reset."""
        for flag in flags:
            if isinstance(flag, str):  # "False" is true
                raise EnvironmentFailedError(f"step() returned {flag!r} for a boolean")
        if names := self._settings.info_metrics:
            if not isinstance(info, Mapping):
                raise wrong_type(TypeError(f"its info is a {type(info).__name__}, not a dict"))
            read_info(info, names, out.info[self.index], self._warn or _nothing)
        self.needs_reset = True

    def _encode(self, observation: Any, frame: NDArray[Any]) -> None:
        try:
            self._write(observation, frame)
        except (TypeError, ValueError) as error:
            raise wrong_type(error) from error

    def replay(self, episode: int, actions: NDArray[Any], frame: NDArray[Any]) -> None:
        """Restart an episode, repeat its actions [T, …] and write the resulting frame."""
        self.force_reset(episode - 1)
        self.start(frame)
        self.apply_actions(actions, frame)

    def apply_actions(self, actions: NDArray[Any], frame: NDArray[Any]) -> None:
        """Repeat known actions [T, …] of the running episode and write the resulting frame."""
        for action in self.decoder.decode(actions):
            if self.needs_reset:
                raise RuntimeError("the episode ended earlier than it did before")
            observation, _, terminated, truncated, _ = self._step(action)
            self._write(observation, frame)
            self.needs_reset = bool(terminated or truncated)

    def close(self) -> None:
        """Close the environment; exceptions while closing are only logged."""
        env, self._env = self._env, None
        if env is not None:
            close_quietly(env, f"environment {self.index}")


def close_quietly(env: Any, name: str) -> None:
    """Close an environment; exceptions are only logged: a broken one may not even close."""
    try:
        env.close()
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.debug("%s did not close cleanly", name, exc_info=True)


def wrong_type(error: Exception) -> EnvironmentFailedError:
    """Return the error of an environment that does not return what its spaces say.

    The next one would not either: it is not rebuilt.
    """
    return EnvironmentFailedError(describe(error))


def describe_wrong_reward(reward: Any) -> str:
    """Return what is wrong with a reward that is no number, and what to do about arrays."""
    wrong = f"its reward is {reward!r}, a {type(reward).__name__}, not a number"
    if not isinstance(reward, np.ndarray) and not getattr(reward, "ndim", 0):
        return wrong
    adds = "add them up in a wrapper, such as mo_gymnasium.wrappers:LinearReward"
    return f"{wrong}: {'return reward.item()' if math.prod(reward.shape) == 1 else adds}"


def raise_if_wrong(method: str, error: Exception) -> None:
    """Raise EnvironmentFailedError if a result of `reset` or `step` could not be unpacked.

    In user code, or that of another package, the same exception is about something else.
    """
    if "reset() got an unexpected keyword argument 'seed'" in str(error):
        raise EnvironmentFailedError(f"reset() takes no seed: {SEEDED}") from error
    found = NOT_UNPACKED.match(str(error))
    last = traceback.extract_tb(error.__traceback__, limit=-1)
    if found and last and not is_foreign(last[-1].filename):
        number, kind = found.groups()
        what = f"a {kind}" if kind else f"{number or 'too many'} values"
        raise wrong_result(method, what) from error


def wrong_result(method: str, what: str) -> EnvironmentFailedError:
    """Return the error of a result of `reset` or `step` that is no tuple of the right length."""
    hint = OLD_STEP if (method, what) == ("step", "4 values") else ""
    return EnvironmentFailedError(f"{method}() returned {what}, not {RESULTS[method]}{hint}")


def images_of(env: gym.Env[Any, Any], settings: EnvSettings) -> ImageSettings:
    """Return the image settings of an environment; kernels declare their own axes in metadata."""
    images, bare = settings.images, env.unwrapped
    axes = (bare.metadata or {}).get("image_axes")
    if axes is None or images.axes != "auto" or env.observation_space != bare.observation_space:
        return images
    return images._replace(axes=axes)


def _nothing(_: str) -> None:
    """Discard a warning: environment 0 logs it."""


class WarnOnce:
    """Logs each distinct warning about an environment once."""

    def __init__(self, env_id: str) -> None:
        self._env_id = env_id
        self._seen: set[str] = set()

    def __call__(self, remark: str) -> None:
        """Log the message unless it is empty, a repetition, or beyond MAX_WARNINGS."""
        if remark and remark not in self._seen and len(self._seen) < MAX_WARNINGS:
            self._seen.add(remark)
            log.warning("%s: %s", self._env_id, remark)


def check_first_steps(env: gym.Env[Any, Any], warn: Warn) -> tuple[gym.Env[Any, Any], _FirstSteps]:
    """Insert the checks of first steps between the user's environment and Gymnasium's wrappers."""
    outer: Any = None
    inner = env
    while type(inner) in GYM_WRAPPERS:
        outer, inner = inner, inner.env  # type: ignore[attr-defined]
    checks = _FirstSteps(inner, warn, outer)
    if outer is None:
        return checks, checks
    outer.env = checks
    return env, checks


class _FirstSteps(gym.Wrapper[Any, Any, Any, Any]):
    """Checks the first calls' results, then removes itself from between `outer` and `env`."""

    def __init__(self, env: gym.Env[Any, Any], warn: Warn, outer: Any) -> None:
        super().__init__(env)
        self._warn, self._outer = warn, outer
        self._left, self._late = FIRST_STEPS, False
        self.masks_ignored = False  # reset gave none, though any were used
        self._built_with = self._spaces()

    def _spaces(self) -> dict[str, gym.Space[Any]]:
        return {name: getattr(self.env, name) for name in ("observation_space", "action_space")}

    def check_next(self) -> None:
        """Check one more step, and whether the spaces are those that it was built with."""
        self._left, self._late = 1, True
        if self._outer is not None:
            self._outer.env = self
        for name, space in self._spaces().items():
            if space != self._built_with[name]:
                was = self._built_with[name]
                self._warn(f"its {name} is {space} now; {was}, that it was built with, is used")

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(**kwargs)
        if self._left > 0:
            if not isinstance(result, tuple) or len(result) != 2:
                raise wrong_result("reset", _describe_result(result))

            @functools.wraps(self.env.reset)
            def reset(**_: Any) -> Any:
                return result

            self._check(env_reset_passive_checker, reset=reset)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        if self._left > 0:
            if not isinstance(result, tuple) or len(result) != 5:
                raise wrong_result("step", _describe_result(result))
            self._check(env_step_passive_checker, action, step=lambda _: result)
            if self.masks_ignored and isinstance(result[4], dict) and MASK_KEY in result[4]:
                self._warn(RESET_LACKS_MASK)
            self._left -= 1
        elif self._outer is not None:
            self._outer.env = self.env
        return result

    def _check(self, checker: Callable[..., Any], *arguments: Any, **methods: Any) -> None:
        """Pass a result to Gymnasium's passive checker, without calling the environment again."""
        shown = SimpleNamespace(observation_space=self.observation_space, **methods)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                checker(shown, *arguments)
            except AssertionError as error:
                if not self._late:
                    raise EnvironmentFailedError(one_line(str(error))) from None
                self._warn(one_line(str(error)))
            except Exception as error:  # values are validated elsewhere
                self._warn(f"cannot be checked: {describe(error)}")
        for warning in caught:
            self._warn(strip_style(str(warning.message)))


def _describe_result(result: Any) -> str:
    kind = type(result).__name__
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {kind}"


def strip_style(text: str) -> str:
    """Remove Gymnasium's colour codes and label."""
    return one_line(re.sub(r"\x1b\[\d*m", "", text)).removeprefix("WARN: ")
