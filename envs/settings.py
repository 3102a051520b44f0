"""The settings of the environments; light, because they are checked before anything heavy loads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from steadyrl.core.errors import SettingError

# More than anybody means, and less than what they are kept in can hold.
UPPER_BOUNDS = {
    "num_envs": (65_536, "every row holds all of them"),
    "frame_stack": (1_000, "every observation holds so many frames"),
    "step_timeout": (1_000_000, "that is eleven days"),
    "max_restarts": (1_000_000, "each is remembered for an hour"),
}
# Keywords of Gymnasium's own, which never reach the environment.
RESERVED_KWARGS = {
    "id": "use env.id",
    "num_envs": "use env.num_envs",
    "vectorization_mode": "use env.backend",
    "vector_kwargs": "use env.backend",
    "disable_env_checker": "the first steps are always checked",
}


class WrapperSpec(NamedTuple):
    """One wrapper: a name of Gymnasium's or `module:Class`, and its keyword arguments."""

    name: str
    arguments: dict[str, Any]

    @classmethod
    def parse(cls, written: str | dict[str, Any]) -> WrapperSpec:
        """Read a name, or one name with its arguments."""
        pairs: dict[Any, Any] = {written: {}} if isinstance(written, str) else written
        (name, given), *more = pairs.items() or [(None, None)]
        arguments = {} if given is None else given
        named = isinstance(arguments, dict) and all(isinstance(key, str) for key in arguments)
        if more or not (isinstance(name, str) and name and named):
            form = "write a name, or {name: {argument: value}}"
            raise SettingError("wrappers", written, form)
        return cls(name, arguments)


BackendName = Literal["auto", "sync", "async", "kernel", "native", "ale", "envpool"]
Masks = Literal["auto", "true", "false"]
ImageAxes = Literal["auto", "hwc", "chw", "vector"]


class ImageSettings(NamedTuple):
    """How observations that may be images are read."""

    axes: ImageAxes = "auto"
    range: tuple[float, ...] | None = None  # lowest and highest number; None: as declared

    @property
    def declared(self) -> bool:
        """Whether somebody says that observations are images."""
        return self.axes in ("hwc", "chw") or self.range is not None


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """Which environment, how many of it, and how they are run."""

    id: str
    num_envs: int
    backend: BackendName
    frame_stack: int
    kwargs: dict[str, Any]
    wrappers: tuple[str | dict[str, Any], ...]  # names, or {name: arguments}; innermost first
    action_masks: Masks  # whether it says which actions it allows; auto: if it does
    image_axes: ImageAxes  # the order of an image's axes; vector: there are no images
    image_range: tuple[float, ...] | None  # lowest and highest number; None: as declared
    step_timeout: float  # seconds one environment may take for one step; processes only
    info_metrics: tuple[str, ...]  # numbers in `info` to log where episodes end
    max_restarts: int  # rebuilt environments per hour before the run stops; 0 stops at once

    checked = True  # its first steps are, and what is wrong with them is said
    role = ""  # of its environments, where they are not those of training

    def for_evaluation(self) -> EnvSettings:
        """Return the settings under which scores are measured: whole games, not lives."""
        kwargs = dict(self.kwargs)
        if "episodic_life" in kwargs:
            kwargs["episodic_life"] = False
        return EvaluationSettings(**{**vars(self), "kwargs": kwargs, "info_metrics": ()})

    def with_masks(self, found: bool) -> EnvSettings:
        """Return the settings once it is known whether the environment gives masks."""
        return replace(self, action_masks="true" if found else "false")

    @property
    def images(self) -> ImageSettings:
        """How observations that may be images are read."""
        return ImageSettings(self.image_axes, self.image_range)

    @property
    def needs_single_envs(self) -> bool:
        """Whether each environment is asked for, or surrounded by, what no batch of them has."""
        return bool(self.wrappers) or self.action_masks == "true"

    def for_rendering(
        self,
        *,
        video: str | None,
        episodes: int,
        max_episode_steps: int,
        preview: str | None = None,
    ) -> RenderSettings:
        """Return the settings of one environment as in evaluation, which can be looked at."""
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
        self._refuse_odd_range()
        self._refuse_keywords()
        _ = self.wrapping  # which refuses what it cannot read

    @property
    def wrapping(self) -> tuple[WrapperSpec, ...]:
        """The wrappers with their arguments."""
        return tuple(map(WrapperSpec.parse, self.wrappers))

    def _refuse_odd_range(self) -> None:
        limits = self.image_range
        if limits is None:
            return
        if (
            len(limits) != 2
            or not limits[0] < limits[1]
            or not math.isfinite(limits[1] - limits[0])
        ):
            reason = "must be the lowest and the highest number of an image, such as [0,1]"
            raise SettingError("image_range", list(limits), reason)
        if self.image_axes == "vector":
            reason = "scales images, and with env.image_axes=vector there are none"
            raise SettingError("image_range", list(limits), reason)

    def _refuse_keywords(self) -> None:
        for key, value in self.kwargs.items():
            if not isinstance(key, str):
                raise SettingError(f"kwargs.{key}", value, "a keyword is a name")
            if key in RESERVED_KWARGS:
                raise SettingError(f"kwargs.{key}", value, f"cannot be set: {RESERVED_KWARGS[key]}")


class EvaluationSettings(EnvSettings):
    """The environments of evaluation, about which everything was said in training."""

    checked = False
    role = "evaluation's "


@dataclass(frozen=True, kw_only=True)
class RenderSettings(EvaluationSettings):
    """One environment that is looked at: in a window, or in a file that is written."""

    role = "the shown "

    video: str | None  # the file, an mp4 or a gif; None: a window
    video_episodes: int  # so many are filmed
    max_episode_steps: int  # an episode is over after so many, whatever the environment says
    preview: str | None  # a small gif of the first pictures besides
