"""Settings of the environments (`env`). Imports nothing heavy: settings are checked first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from steadyrl.core.errors import SettingError

# Upper bounds: above any sensible value, below what the data types hold.
UPPER_BOUNDS = {
    "num_envs": (65_536, "every timestep holds all of them"),
    "frame_stack": (1_000, "every observation holds that many frames"),
    "step_timeout": (1_000_000, "that is eleven days"),
    "max_restarts": (1_000_000, "each is remembered for an hour"),
}
# Keyword arguments of gymnasium.make that never reach the environment.
RESERVED_KWARGS = {
    "id": "use env.id",
    "num_envs": "use env.num_envs",
    "vectorization_mode": "use env.backend",
    "vector_kwargs": "use env.backend",
    "disable_env_checker": "the first steps are always checked",
}


class WrapperSpec(NamedTuple):
    """One wrapper: a name in gymnasium.wrappers or `module:Class`, and its keyword arguments."""

    name: str
    arguments: dict[str, Any]

    @classmethod
    def parse(cls, written: str | dict[str, Any]) -> WrapperSpec:
        """Parse `name` or `{name: {argument: value}}`."""
        pairs: dict[Any, Any] = {written: {}} if isinstance(written, str) else written
        (name, given), *more = pairs.items() or [(None, None)]
        arguments = {} if given is None else given
        named = isinstance(arguments, dict) and all(isinstance(key, str) for key in arguments)
        if more or not (isinstance(name, str) and name and named):
            form = "write a name, or {name: {argument: value}}"
            raise SettingError("wrappers", written, form)
        return cls(name, arguments)


# A wrapper's argument that names something to import, such as a function.
MODULE_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


def imported_names(written: object) -> list[str]:
    """Return the names in an entry of `env.wrappers` for which a module may be imported."""
    pairs = written.items() if isinstance(written, Mapping) else [(written, None)]
    names = [name for name, _ in pairs if isinstance(name, str) and ":" in name]
    for _, arguments in pairs:
        values = arguments.values() if isinstance(arguments, Mapping) else ()
        names += [each for each in values if isinstance(each, str) and MODULE_NAME.fullmatch(each)]
    return names


def _keys(value: object) -> Iterator[object]:
    """Yield the keys of all mappings in a plain value."""
    inside: Iterable[object] = value if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        yield from value
        inside = value.values()
    for each in inside:
        yield from _keys(each)


BackendName = Literal["auto", "sync", "async", "kernel", "batch", "ale", "envpool"]
Masks = Literal["auto", "true", "false"]
ImageAxes = Literal["auto", "hwc", "chw", "vector"]


class ImageSettings(NamedTuple):
    """How image observations are interpreted."""

    axes: ImageAxes = "auto"
    range: tuple[float, ...] | None = None  # lowest and highest value; None: the space's bounds

    @property
    def declared(self) -> bool:
        """Whether the settings declare that observations are images."""
        return self.axes in ("hwc", "chw") or self.range is not None


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """Which environment, how many copies, and how they are run (`env`)."""

    id: str
    num_envs: int
    backend: BackendName
    frame_stack: int
    kwargs: dict[str, Any]
    wrappers: tuple[str | dict[str, Any], ...]  # names, or {name: arguments}; innermost first
    action_masks: Masks  # whether the environment provides action masks; auto: detect
    image_axes: ImageAxes  # order of an image's axes; vector: treat images as vectors
    image_range: tuple[float, ...] | None  # lowest and highest value; None: the space's bounds
    step_timeout: float  # seconds one environment may take for one step; backend async only
    info_metrics: tuple[str, ...]  # numbers in `info` to log at episode ends
    max_restarts: int  # rebuilt environments per hour before the run stops; 0 stops at once

    checked = True  # check the first steps against Gymnasium's API and log what is wrong
    role = ""  # prefix of error messages: "evaluation's ", "the shown "
    continues_after_life = False  # FIRE, or NOOP, follows a lost life that ends no episode

    def for_evaluation(self) -> EnvSettings:
        """Return the settings of evaluation: episodes are whole games, not lives."""
        kwargs = dict(self.kwargs)
        changed: dict[str, Any] = {"info_metrics": (), "kwargs": kwargs}
        if kwargs.get("episodic_life"):
            # The policy never saw the wait for FIRE after a lost life: training presses it.
            changed["continues_after_life"] = True
            kwargs["episodic_life"] = False
        return EvaluationSettings(**{**vars(self), **changed})

    def with_masks(self, found: bool) -> EnvSettings:
        """Return the settings with `action_masks` resolved to true or false."""
        return replace(self, action_masks="true" if found else "false")

    @property
    def images(self) -> ImageSettings:
        """How image observations are interpreted."""
        return ImageSettings(self.image_axes, self.image_range)

    @property
    def needs_single_envs(self) -> bool:
        """Whether wrappers or action masks need single environments rather than a batch backend."""
        return bool(self.wrappers) or self.action_masks == "true"

    def for_rendering(
        self,
        *,
        video: str | None,
        episodes: int,
        max_episode_steps: int,
        preview: str | None = None,
    ) -> RenderSettings:
        """Return the settings of one evaluation environment that renders."""
        return RenderSettings(
            **{**vars(self.for_evaluation()), "num_envs": 1, "max_restarts": 0},
            video=video,
            video_episodes=episodes,
            max_episode_steps=max_episode_steps,
            preview=preview,
        )

    def __post_init__(self) -> None:
        if not self.id:
            raise SettingError("id", repr(self.id), "name an environment, for example CartPole-v1")
        for field in ("num_envs", "frame_stack"):
            if getattr(self, field) < 1:
                raise SettingError(field, getattr(self, field), "must be at least 1")
        if not (math.isfinite(self.step_timeout) and self.step_timeout > 0):
            raise SettingError("step_timeout", self.step_timeout, "must be a positive number")
        if self.max_restarts < 0:
            raise SettingError("max_restarts", self.max_restarts, "must not be negative")
        for field, (most, why) in UPPER_BOUNDS.items():
            if getattr(self, field) > most:
                reason = f"must be at most {most:,}: {why}"
                raise SettingError(field, getattr(self, field), reason)
        names = self.info_metrics
        if "" in names or len(set(names)) < len(names):
            raise SettingError("info_metrics", list(names), "must be different names")
        self._validate_range()
        self._validate_keywords()
        _ = self.wrapping  # raises SettingError for invalid entries
        self._validate_keys_inside()

    @property
    def wrapping(self) -> tuple[WrapperSpec, ...]:
        """The parsed wrappers."""
        return tuple(map(WrapperSpec.parse, self.wrappers))

    def _validate_range(self) -> None:
        limits = self.image_range
        if limits is None:
            return
        if (
            len(limits) != 2
            or not limits[0] < limits[1]
            or not math.isfinite(limits[1] - limits[0])
        ):
            reason = "must be the lowest and the highest pixel value, such as [0,1]"
            raise SettingError("image_range", list(limits), reason)
        if self.image_axes == "vector":
            reason = "scales images, but env.image_axes=vector treats them as vectors"
            raise SettingError("image_range", list(limits), reason)

    def _validate_keywords(self) -> None:
        for key, value in self.kwargs.items():
            if not isinstance(key, str):
                raise SettingError(f"kwargs.{key}", value, "keyword arguments must be names")
            if key in RESERVED_KWARGS:
                raise SettingError(f"kwargs.{key}", value, f"cannot be set: {RESERVED_KWARGS[key]}")

    def _validate_keys_inside(self) -> None:
        for field in ("kwargs", "wrappers"):
            value = getattr(self, field)
            for key in _keys(value):
                if not isinstance(key, str):
                    reason = f"has the key {key!r}, and checkpoints keep only texts as keys"
                    hint = f"write a list of pairs, such as [[{key!r},value]]"
                    raise SettingError(field, value, f"{reason}: {hint}")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(EnvSettings):
    """Settings of evaluation environments: no checks, training's already logged the warnings."""

    checked = False
    role = "evaluation's "

    continues_after_life: bool = False


@dataclass(frozen=True, kw_only=True)
class RenderSettings(EvaluationSettings):
    """Settings of one rendered environment: in a window, or recorded to a file."""

    role = "the shown "

    video: str | None  # output file, mp4 or gif; None: a window
    video_episodes: int  # episodes to record
    max_episode_steps: int  # recording treats an episode as ended after this many steps
    preview: str | None  # additional small GIF of the first frames
