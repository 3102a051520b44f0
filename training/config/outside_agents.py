"""Algorithms of other packages: their defaults join the configuration group `agent` when named."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from steadyrl.agents.registry import ALGORITHMS, find_entry_point
from steadyrl.core.errors import SettingError, describe

AGENT_KEYS = ("agent", "agent.name")  # that may name one


def offer_agents(override: str) -> str:
    """Offer the agents that an override names to Hydra; return the override it should read.

    `agent.name=X` alone would give X another agent's keys: it becomes `agent=X`.
    """
    key, _, value = override.partition("=")
    if key not in AGENT_KEYS:
        return override
    names = value.split(",")
    offered = [_offer(name) for name in names if name and name not in ALGORITHMS]
    return f"agent={value}" if any(offered) else override


def names_outside_agent(override: str) -> bool:
    """Return whether an override names one agent, which is none of ours."""
    key, _, value = override.partition("=")
    return key in AGENT_KEYS and value not in ALGORITHMS


def _offer(name: str) -> bool:
    try:
        found = find_entry_point(name)
    except SettingError as error:
        raise error.below("agent") from error
    if found is None:
        return False
    if found.defaults is None:
        raise SettingError("agent", name, "its Algorithm has no defaults file")
    try:
        defaults = OmegaConf.load(found.defaults)
    except Exception as error:  # missing, or not YAML
        reason = f"its defaults {found.defaults} cannot be read: {describe(error)}"
        raise SettingError("agent", name, reason) from error
    ConfigStore.instance().store(group="agent", name=name, node=defaults, provider="outside")
    return True
