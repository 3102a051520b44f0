"""The algorithms: ours a line each, those from outside found by Python's entry points.

A name in a configuration chooses among what is installed; it is never imported as a path.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.core.errors import SettingError, describe, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from steadyrl.agents.base import Actor, Agent
    from steadyrl.agents.distillation.teacher import Teacher
    from steadyrl.envs.types import EnvSpec

GROUP = "steadyrl.agents"


class AgentSettings(Protocol):
    """What every algorithm's settings have: a name, and checks against the environment."""

    @property
    def name(self) -> str:
        """Name of the algorithm."""

    def refuse_unfit(self, spec: EnvSpec, total_steps: int) -> None:
        """Refuse environments and run lengths that these settings do not fit."""


@runtime_checkable
class Shareable(Protocol):
    """What the settings have of an algorithm that several ranks can train together."""

    def of_rank(self, rank: int, size: int) -> AgentSettings:
        """Return the settings of one rank, whose part all together make up these."""


@runtime_checkable
class Masking(Protocol):
    """What the settings have of an algorithm that takes allowed actions only."""

    takes_masks: bool


@runtime_checkable
class Compiling(Protocol):
    """What the settings have of an algorithm whose updates can be one compiled graph."""

    compile: str

    def expected_updates(self, spec: EnvSpec, total_steps: int) -> int:
        """Return how many updates a run has."""


@runtime_checkable
class Batching(Protocol):
    """What the settings have of an algorithm that says how many observations an update reads."""

    def update_batch(self, spec: EnvSpec) -> int:
        """Return the observations of one gradient step."""


def of_rank(settings: AgentSettings, rank: int, size: int) -> AgentSettings:
    """Return the settings of one of `size` ranks; refuse those that cannot be shared."""
    if size == 1:
        return settings
    if not isinstance(settings, Shareable):
        reason = "trains in one process only: its settings do not say what each rank's part is"
        raise SettingError("agent.name", settings.name, reason)
    return settings.of_rank(rank, size)


class Algorithm(NamedTuple):
    """Where an algorithm is; its module is imported only when a run needs it (torch is slow)."""

    settings: type[AgentSettings]
    module: str
    cls: str
    defaults: Path | None = None  # a YAML file; ours lie in configs/agent


class Sample(NamedTuple):
    """How actions are drawn: for so many environments, by a generator with this seed."""

    num_envs: int
    seed: int


ALGORITHMS = {
    "dqn": Algorithm(DQNSettings, "steadyrl.agents.dqn.agent", "DQN"),
    "ppo": Algorithm(PPOSettings, "steadyrl.agents.ppo.agent", "PPO"),
}
# Those that take a teacher: what is built in place of them where there is one.
DISTILLED = {
    "dqn": ("steadyrl.agents.distillation.agents", "DistilledDQN"),
    "ppo": ("steadyrl.agents.distillation.agents", "DistilledPPO"),
}
# The same of PPO that is curious, without a teacher and with one.
WITH_RND = {
    False: ("steadyrl.agents.rnd.agent", "RNDPPO"),
    True: ("steadyrl.agents.rnd.agent", "DistilledRNDPPO"),
}


def algorithm(name: str) -> Algorithm:
    """Return the algorithm called `name`, ours or one that is installed."""
    found = ALGORITHMS.get(name) or find_entry_point(name)
    if found is None:
        names = ", ".join([*ALGORITHMS, *sorted(entry_points(group=GROUP).names)])
        raise SettingError("name", name, f"no such agent; there are: {names}")
    return found


def find_entry_point(name: str) -> Algorithm | None:
    """Return the installed algorithm of this name, if there is one."""
    for point in entry_points(group=GROUP, name=name):
        where = f"its entry point {point.value}"
        try:
            found = point.load()
        except (Exception, SystemExit) as error:  # foreign code
            if is_out_of_memory(error):
                raise
            reason = f"{where} cannot be imported: {describe(error)}"
            raise SettingError("name", name, reason) from error
        if not isinstance(found, Algorithm):
            raise SettingError("name", name, f"{where} is no steadyrl.agents.registry.Algorithm")
        return found
    return None


def settings_type(name: str) -> type[AgentSettings]:
    """Return the settings class of the algorithm called `name`."""
    return algorithm(name).settings


def build_agent(
    settings: AgentSettings,
    spec: EnvSpec,
    *,
    device: torch.device,
    seed: int,
    total_steps: int,
    teacher: Teacher | None = None,
) -> Agent:
    """Build the agent that `settings` describe."""
    numbers: dict[str, Any] = {"device": device, "seed": seed, "total_steps": total_steps}
    entry = None if teacher is None else DISTILLED[settings.name]
    if isinstance(settings, PPOSettings) and settings.rnd.coef:
        entry = WITH_RND[teacher is not None]
    if teacher is not None:
        numbers["teacher"] = teacher
    cls: Any = agent_class(settings.name)
    if entry is not None:
        cls = getattr(import_module(entry[0]), entry[1])
    agent: Agent = cls(settings, spec, **numbers)
    return agent


def agent_class(name: str) -> type[Agent]:
    """Import the agent of the algorithm called `name`."""
    entry = algorithm(name)
    cls: type[Agent] = getattr(import_module(entry.module), entry.cls)
    return cls


def finished_policy(
    settings: AgentSettings,
    spec: EnvSpec,
    weights: Mapping[str, Tensor],
    *,
    device: torch.device,
    sample: Sample | None = None,
) -> Actor:
    """Return an actor that decides by `weights`, which are what `Agent.weights` gave.

    The observations' normaliser is among them. The actor is greedy and takes any number of
    environments, or it draws its actions for as many as `sample` says.
    """
    cls = agent_class(settings.name)
    if sample is None:
        network, actor = cls.policy(settings, spec, device)
    else:
        drawn = sample._asdict()
        network, actor = cls.sampling_policy(settings, spec, device, **drawn)
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
