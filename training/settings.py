"""The typed root of the configuration, and a job: all that a run is told from outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agents.registry import AgentSettings, settings_type
from envs.settings import EnvSettings
from envs.types import EnvSpec
from memory.errors import SettingError, at_least
from memory.settings import MemorySettings
from training.typed import build, convert, show


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """How often, and over how many greedy episodes, the agent is evaluated."""

    every: int  # steps; 0 = never
    episodes: int
    max_episode_steps: int

    def __post_init__(self) -> None:
        at_least(self, 0, "every")
        at_least(self, 1, "episodes", "max_episode_steps")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """How often metrics are written."""

    every: int  # steps; 0 = never

    def __post_init__(self) -> None:
        at_least(self, 0, "every")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What concerns the run as a whole."""

    total_steps: int
    seed: int
    device: Literal["auto", "cpu", "cuda"]
    threads: Literal["auto"] | int
    run_dir: str | None
    eval: EvalSettings
    log: LogSettings
    env: EnvSettings
    memory: MemorySettings

    def __post_init__(self) -> None:
        at_least(self, 1, "total_steps")
        at_least(self, 0, "seed")
        if self.threads != "auto" and self.threads < 1:
            raise SettingError("threads", self.threads, "must be auto, or 1 or more")
        if self.env.num_envs > self.total_steps:
            raise SettingError(
                "env.num_envs",
                self.env.num_envs,
                f"one row would be more than total_steps={self.total_steps}",
            )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole, accepted configuration."""

    run: RunSettings
    agent: AgentSettings


class Job(NamedTuple):
    """Checked settings, the environment's shape, and what to keep of how they came about."""

    settings: Settings
    spec: EnvSpec
    config: dict[str, Any]  # composed and resolved, for config.yaml
    hydra: dict[str, Any]  # what .hydra/ keeps: config, hydra, overrides
    directory: Path  # absolute: where the run is kept


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
        raise SettingError(f"agent.{error.field}", error.value, error.reason) from None
    return Settings(run=build(RunSettings, rest), agent=build(cls, agent, "agent."))
