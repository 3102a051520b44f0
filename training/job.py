"""An accepted job: everything a run is told from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from envs.types import EnvSpec
from training.settings import Settings


class Job(NamedTuple):
    """Checked settings, the environment's shape, and what to keep of how they came about."""

    settings: Settings
    spec: EnvSpec
    config: dict[str, Any]  # composed and resolved, for config.yaml
    hydra: dict[str, Any]  # what .hydra/ keeps: config, hydra, overrides
    directory: Path  # absolute: where the run is kept
