"""The closed list of algorithms: one line each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from agents.dqn_settings import DQNSettings
from agents.ppo_settings import PPOSettings
from memory.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from agents.base import Actor, Agent
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


def finished_policy(
    settings: AgentSettings,
    spec: EnvSpec,
    weights: Mapping[str, Tensor],
    *,
    device: torch.device,
) -> Actor:
    """Return an actor that decides greedily by `weights`, which are what `Agent.weights` gave.

    The observations' normaliser is among them. It takes any number of environments.
    """
    network, actor = agent_class(settings.name).policy(settings, spec, device)
    own = network.state_dict()
    wrong = [f"no {name}" for name in own.keys() - weights.keys()]
    wrong += [f"{name}, which the network has not" for name in weights.keys() - own.keys()]
    wrong += [
        f"{name} {list(weights[name].shape)} in place of {list(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    if wrong:
        raise ValueError(f"the weights are of another policy: {'; '.join(sorted(wrong))}")
    for name, tensor in own.items():
        tensor.detach().copy_(weights[name])
    return actor
