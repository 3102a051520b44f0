"""What a configuration calls a teacher: a policy's place, or `module:name`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.manifest import CheckpointError
from training.typed import show


def is_module(name: str) -> bool:
    """Tell whether a teacher is `module:name` and no path that has a colon."""
    return ":" in name and not os.path.exists(name)


def settle(config: dict[str, Any]) -> None:
    """Name a policy by where it is now, so that it is found from anywhere, and later."""
    agent = config.get("agent")
    name = agent.get("teacher") if isinstance(agent, dict) else None
    if isinstance(name, str) and name.strip() and not is_module(name):
        config["agent"]["teacher"] = os.path.abspath(os.path.expanduser(name))


def refuse_foreign_teacher(
    checkpoint: Path, config: Mapping[str, Any], fresh: Mapping[str, Any]
) -> None:
    """Refuse a module that only a checkpoint asks for."""
    name, typed = (each.get("agent", {}).get("teacher") for each in (config, fresh))
    if isinstance(name, str) and is_module(name) and name != typed:
        raise CheckpointError(
            f"{checkpoint}: agent.teacher={show(name)} imports a module, which a checkpoint cannot "
            "ask for: type agent.teacher=… with it too"
        )
