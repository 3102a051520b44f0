"""The closed list of algorithms: one line each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from agents.dqn_settings import DQNSettings
from agents.ppo_settings import PPOSettings
from memory.errors import SettingError

if TYPE_CHECKING:
    import torch

    from agents.base import Agent
    from envs.types import EnvSpec

AgentSettings = DQNSettings | PPOSettings


class Algorithm(NamedTuple):
    """Where an algorithm is; its module is imported only when a run needs it (torch is slow)."""

    settings: type[AgentSettings]
    module: str
    cls: str


ALGORITHMS = {
    "dqn": Algorithm(DQNSettings, "agents.dqn", "DQN"),
    "ppo": Algorithm(PPOSettings, "agents.ppo", "PPO"),
}


def settings_type(name: object) -> type[AgentSettings]:
    """Return the settings class of the algorithm called `name`."""
    if name not in ALGORITHMS:
        raise SettingError("name", name, f"no such agent; there are: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[str(name)].settings


def build_agent(
    settings: AgentSettings,
    spec: EnvSpec,
    *,
    device: torch.device,
    seed: int,
    total_steps: int,
) -> Agent:
    """Build the agent that `settings` describe."""
    cls: Any = agent_class(settings.name)
    agent: Agent = cls(settings, spec, device=device, seed=seed, total_steps=total_steps)
    return agent


def agent_class(name: str) -> type[Agent]:
    """Import the agent of the algorithm called `name`."""
    entry = ALGORITHMS[name]
    cls: type[Agent] = getattr(import_module(entry.module), entry.cls)
    return cls
