"""How a teacher may be named in the configuration."""

from __future__ import annotations

import os
from typing import Any


def is_module(name: str) -> bool:
    """Tell whether a teacher is `module:name` and no path that has a colon."""
    return ":" in name and not os.path.exists(name)


def settle(config: dict[str, Any]) -> None:
    """Name a policy by where it is now, so that it is found from anywhere, and later."""
    agent = config.get("agent")
    name = agent.get("teacher") if isinstance(agent, dict) else None
    if isinstance(name, str) and name.strip() and not is_module(name):
        config["agent"]["teacher"] = os.path.abspath(os.path.expanduser(name))
