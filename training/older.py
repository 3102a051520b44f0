"""Today's value of every key, for configurations that were saved before there was one."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from omegaconf import OmegaConf

from agents.registry import ALGORITHMS
from training.settings import CONFIGS


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys that it has not got yet."""
    found = deepcopy(dict(config))
    fill(found, _defaults(found))
    return found


def fill(config: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Give the keys that a configuration has not got the values of `defaults`."""
    for key, value in defaults.items():
        if key not in config:
            config[key] = deepcopy(value)
        elif isinstance(config[key], dict) and isinstance(value, Mapping):
            fill(config[key], value)


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    agent = config.get("agent")
    name = agent.get("name") if isinstance(agent, dict) else None
    found = _yaml("config")
    del found["hydra"]
    found["memory"] = _yaml("memory", "default")
    found["env"] = _yaml("env", "cartpole")  # what all environments have
    found["env"]["action_masks"] = False  # which those of before knew nothing of
    if name in ALGORITHMS:
        found["agent"] = _yaml("agent", str(name)) | _yaml("agent", "network", "auto")
    return found


def _yaml(*names: str) -> dict[str, Any]:
    path = CONFIGS.joinpath(*names).with_suffix(".yaml")
    found = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(found, dict)
    found.pop("defaults", None)  # of Hydra: which files come together
    return found  # type: ignore[return-value]
