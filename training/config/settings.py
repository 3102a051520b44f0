"""Root of the typed configuration, and the job built from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf

from steadyrl.agents.registry import ALGORITHMS, AgentSettings, settings_type
from steadyrl.core.errors import (
    SettingError,
    show,
    validate_at_least,
    validate_at_most,
    validate_interval,
    validate_non_negative,
)
from steadyrl.envs.settings import UPPER_BOUNDS, EnvSettings
from steadyrl.envs.types import EnvSpec
from steadyrl.memory.settings import MemorySettings
from steadyrl.training.config.schema import build, convert
from steadyrl.training.config.urls import is_url, validate_url

CONFIGS = Path(__file__).parents[2] / "configs"

PROJECT = re.compile(r"[\w -]+")

LONGEST_NAME = 100  # bytes: a directory's name has the time and an id too

LONGEST_STOP = 1_000_000  # seconds (11 days); the same bound as env.step_timeout

MOST_RECORDED = 1000  # updates; a trace of one has some 100 KB

DEVICES = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """When and over how many greedy episodes the agent is evaluated."""

    every: int
    episodes: int
    seed: int | None
    num_envs: int
    max_episode_steps: int
    video_every: int

    def __post_init__(self) -> None:
        validate_interval(self, "every", "video_every")
        if self.seed is not None and self.seed < 0:
            raise SettingError("seed", self.seed, "must be null, or 0 or more")
        validate_at_least(self, 1, "episodes", "num_envs", "max_episode_steps")
        validate_at_most(self, UPPER_BOUNDS["num_envs"][0], "num_envs")
        validate_at_most(self, 2**53, "max_episode_steps")


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Whether metrics go to Weights & Biases too, and as which run."""

    enabled: bool
    project: str
    entity: str | None
    group: str | None
    tags: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.project:
            raise SettingError("project", self.project, "must be a name")


@dataclass(frozen=True, kw_only=True)
class TrackioSettings:
    """Whether metrics go to Trackio too, and as which run."""

    enabled: bool
    project: str
    group: str | None

    def __post_init__(self) -> None:
        if not PROJECT.fullmatch(self.project):
            reason = "must be of letters, digits, spaces, minus signs and underscores"
            raise SettingError("project", self.project, reason)


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """When metrics are logged, and where to beside metrics.jsonl."""

    every: int
    tensorboard: bool
    wandb: WandbSettings
    trackio: TrackioSettings

    def __post_init__(self) -> None:
        validate_interval(self, "every")


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """When `report.html` is written."""

    every: int  # environment steps
    at_end: bool

    def __post_init__(self) -> None:
        validate_interval(self, "every")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When checkpoints are written, and what they include."""

    every: int  # environment steps
    seconds: float
    keep: Literal["all"] | int
    replay: bool
    mirror: str | None  # URL

    def __post_init__(self) -> None:
        if self.mirror is not None:
            validate_url("mirror", self.mirror)
        validate_interval(self, "every", "seconds")
        if self.keep != "all" and self.keep < 1:
            raise SettingError("keep", self.keep, "must be all, or 1 or more")

    @property
    def most(self) -> int | None:
        """How many of the newest checkpoints are kept; None: all."""
        return None if self.keep == "all" else self.keep


@dataclass(frozen=True, kw_only=True)
class ProfilerSettings:
    """Which updates torch.profiler records."""

    enabled: bool
    wait: int
    warmup: int
    active: int
    repeat: int

    def __post_init__(self) -> None:
        validate_non_negative(self, "wait", "warmup")
        validate_at_least(self, 1, "active", "repeat")
        # torch keeps all that it records in memory until a cycle ends.
        validate_at_most(self, MOST_RECORDED, "active")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the run as a whole."""

    total_steps: int
    seed: int
    seeds: tuple[int, ...] | None
    device: str
    precision: Literal["float32", "tf32", "bf16"]
    deterministic: bool
    threads: Literal["auto"] | int
    stop_timeout: Literal["auto"] | float  # seconds
    run_name: str | None
    run_dir: str | None
    resume: str | None
    init_from: str | None
    callbacks: tuple[str, ...]  # `module:Name`
    eval: EvalSettings
    log: LogSettings
    report: ReportSettings
    profiler: ProfilerSettings
    checkpoint: CheckpointSettings
    env: EnvSettings
    memory: MemorySettings

    def __post_init__(self) -> None:
        validate_at_least(self, 1, "total_steps")
        validate_non_negative(self, "seed")
        for name, path in (("resume", self.resume), ("init_from", self.init_from)):
            if path is not None and not path.strip():
                raise SettingError(name, path, "names no run; leave it out for a new one")
        if is_url(self.resume):
            validate_url("resume", str(self.resume))
        self._validate_seeds()
        self._validate_name()
        if not DEVICES.fullmatch(self.device):
            reason = "must be one of auto, cpu, cuda, or a card by its number: cuda:1"
            raise SettingError("device", self.device, reason)
        if self.threads != "auto" and self.threads < 1:
            raise SettingError("threads", self.threads, "must be auto, or 1 or more")
        if self.stop_timeout != "auto" and not 0 < self.stop_timeout <= LONGEST_STOP:
            reason = f"must be auto, or above 0 and at most {LONGEST_STOP:,} seconds"
            raise SettingError("stop_timeout", self.stop_timeout, reason)
        if self.env.num_envs > self.total_steps:
            raise SettingError(
                "env.num_envs",
                self.env.num_envs,
                f"one row would be more than total_steps={self.total_steps}",
            )

    def _validate_seeds(self) -> None:
        if self.seeds is None:
            return
        if not self.seeds:
            raise SettingError("seeds", [], "names none; [0,1,2] are three runs, null is one")
        if min(self.seeds) < 0:
            raise SettingError("seeds", self.seeds, "must be 0 or more")
        twice = next((seed for seed in self.seeds if self.seeds.count(seed) > 1), None)
        if twice is not None:
            raise SettingError("seeds", self.seeds, f"names {twice} twice")

    def _validate_name(self) -> None:
        name = self.run_name
        if name is None:
            return
        reason = None
        if not name.strip() or name[0] in ".-":
            reason = "must be null, or a name that begins with no dot and no minus sign"
        elif "/" in name or "\\" in name:
            reason = "is a name, not a path; a path is given by run_dir"
        elif not name.isprintable():
            reason = "has characters that cannot be printed"
        elif len(name.encode()) > LONGEST_NAME:
            reason = f"is longer than {LONGEST_NAME} bytes"
        if reason is not None:
            raise SettingError("run_name", name.encode("unicode_escape").decode(), reason)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The validated configuration."""

    run: RunSettings
    agent: AgentSettings

    def values(self) -> dict[str, Any]:
        """Return the values of all keys, nested as in a configuration, of their keys' types."""
        return {**asdict(self.run), "agent": asdict(self.agent)}  # type: ignore[call-overload]


class Job(NamedTuple):
    """Validated settings, environment spec, and the configuration files to save with the run."""

    settings: Settings
    spec: EnvSpec
    config: dict[str, Any]  # composed and resolved, for config.yaml
    hydra: dict[str, Any]  # contents of .hydra/: config, hydra, overrides
    directory: Path  # absolute run directory
    # If resumed: the overrides that changed; None for a new run.
    continues: tuple[str, ...] | None = None
    checkpoint: Path | None = None  # that it is resumed from, if one was named
    label: str = ""  # which of several runs this is, for progress lines
    own_process: bool = True  # else the process is another program's (`steadyrl.train`)
    quiet: bool = False  # print nothing
    callbacks: tuple[Any, ...] = ()  # of `training/callbacks`


def load_settings(values: Mapping[str, Any]) -> Settings:
    """Build the settings from a composed, resolved configuration."""
    rest = dict(values)
    agent = rest.pop("agent", "")
    if not isinstance(agent, Mapping):
        raise SettingError(
            "agent", show(agent), "is a group of keys; choose a file of configs/agent"
        )
    try:
        cls = settings_type(convert(str, agent.get("name"), "name"))
    except SettingError as error:
        raise error.below("agent") from None
    return Settings(run=build(RunSettings, rest), agent=build(cls, agent, "agent."))


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with defaults for keys that it lacks."""
    found = deepcopy(dict(config))
    for *groups, last, default in _missing(config, _defaults(config)):
        group = found
        for name in groups:
            group = group[name]
        group[last] = deepcopy(default)
    return found


def missing_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys that a stored configuration lacks."""
    return [".".join(key) for *key, _ in _missing(config, _defaults(config))]


def _missing(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield (*path, default) of every missing key."""
    for key, default in defaults.items():
        if key not in config:
            yield key, default
        elif isinstance(config[key], Mapping) and isinstance(default, Mapping):
            yield from ((key, *rest) for rest in _missing(config[key], default))


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    agent = config.get("agent")
    return defaults_for(agent.get("name") if isinstance(agent, dict) else None)


def defaults_for(agent: object) -> dict[str, Any]:
    """Return the configuration without any override, and with the keys of an agent, if known."""
    found = _yaml("config")
    del found["hydra"]
    found["memory"] = _yaml("memory", "default")
    found["env"] = _yaml("env_defaults") | _yaml("env", "cartpole")
    if isinstance(agent, str) and agent in ALGORITHMS:
        found["agent"] = _yaml("agent", agent)
    return found


def _yaml(*names: str) -> dict[str, Any]:
    path = CONFIGS.joinpath(*names).with_suffix(".yaml")
    found = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(found, dict)
    found.pop("defaults", None)  # Hydra's defaults list
    return found  # type: ignore[return-value]
