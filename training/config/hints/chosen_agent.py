"""The agent that a command line chooses: for hints, before the configuration is composed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from steadyrl.agents.registry import ALGORITHMS
from steadyrl.training.config.settings import CONFIGS


def agent_of(typed: Sequence[str], presets: Path | None = None) -> str:
    """Return the agent that a command line chooses, itself or by a preset."""
    chosen = dict(text.lstrip("-").split("=", 1) for text in typed if "=" in text)
    made_for = agent_of_preset(chosen.get("experiment", "").strip("'\""), presets)
    return chosen.get("agent", "").strip("'\"") or made_for or default_agent()


def agent_of_preset(preset: str, presets: Path | None) -> str | None:
    """Return the agent of an experiment, one of ours or in the folder `presets`; None: unknown."""
    for folder in (CONFIGS, presets) if preset else ():
        path = None if folder is None else folder / "experiment" / f"{preset}.yaml"
        if path is not None and path.is_file():
            found = re.search(r"override /agent: *(\w+)", path.read_text("utf-8", "replace"))
            return found.group(1) if found else None
    return None


def default_agent() -> str:
    """Return the agent that trains where none is chosen."""
    found = re.search(r"^ *- agent: *(\w+)", (CONFIGS / "config.yaml").read_text("utf-8"), re.M)
    return found.group(1) if found else next(iter(ALGORITHMS))
