"""How a teacher may be named in the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def is_module(name: str) -> bool:
    """Tell whether a teacher is `module:name` and no path that has a colon."""
    return ":" in name and not os.path.exists(name)


def settle(config: dict[str, Any]) -> None:
    """Name a policy by where it is now, so that it is found from anywhere, and later."""
    name = named(config)
    if isinstance(name, str) and name.strip() and not is_module(name):
        config["agent"]["teacher"]["policy"] = os.path.abspath(os.path.expanduser(name))


def named(config: Mapping[str, Any]) -> Any:
    """Return `agent.teacher.policy` of a configuration that may hold anything, or None."""
    for key in ("agent", "teacher"):
        config = config.get(key) or {}
        if not isinstance(config, Mapping):
            return None
    return config.get("policy")
