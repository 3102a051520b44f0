"""Names of a teacher in the configuration: a policy directory or `module:name`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

KEY = "agent.teacher.policy"


def is_module(name: str) -> bool:
    """Return whether a teacher's name is `module:name` and not a path with a colon."""
    return ":" in name and not os.path.exists(name)


def make_teacher_path_absolute(config: dict[str, Any]) -> None:
    """Make the teacher's policy path absolute, so that a resumed run finds it from anywhere."""
    name = teacher_name(config)
    if isinstance(name, str) and name.strip() and not is_module(name):
        config["agent"]["teacher"]["policy"] = os.path.abspath(os.path.expanduser(name))


def teacher_name(config: Mapping[str, Any]) -> Any:
    """Return `agent.teacher.policy` of an unchecked configuration, or None."""
    for key in ("agent", "teacher"):
        config = config.get(key) or {}
        if not isinstance(config, Mapping):
            return None
    return config.get("policy")
