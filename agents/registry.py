"""The registry of algorithms: built-in ones, and those installed as entry points.

A configured name selects an installed algorithm; it is never imported as a path.
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
    from steadyrl.envs.types import ActionSpec, EnvSpec

GROUP = "steadyrl.agents"


class AgentSettings(Protocol):
    """What the settings of every algorithm provide."""

    @property
    def name(self) -> str:
        """Name of the algorithm."""

    def validate_fit(self, spec: EnvSpec, total_steps: int) -> None:
        """Raise SettingError for environments or run lengths that do not fit."""


@runtime_checkable
class SupportsRanks(Protocol):
    """Settings of an algorithm that supports several ranks."""

    def of_rank(self, rank: int, size: int) -> AgentSettings:
        """Return one rank's settings; those of all ranks together make up these."""


@runtime_checkable
class SupportsMasks(Protocol):
    """Settings of an algorithm that supports action masks."""

    takes_masks: bool


@runtime_checkable
class LimitsActions(Protocol):
    """Settings of an algorithm that supports some kinds of actions only."""

    action_kinds: tuple[type[ActionSpec], ...]


@runtime_checkable
class SupportsCompile(Protocol):
    """Settings of an algorithm whose updates can be compiled."""

    compile: str

    def expected_updates(self, spec: EnvSpec, total_steps: int) -> int:
        """Return the updates of a run; those that compiling speeds up more may count as several."""


@runtime_checkable
class HasBatchSize(Protocol):
    """Settings of an algorithm that knows its batch size."""

    def update_batch(self, spec: EnvSpec) -> int:
        """Return the observations per gradient step."""


@runtime_checkable
class HasExtensions(Protocol):
    """Settings that switch extensions on."""

    @property
    def extensions(self) -> tuple[str, ...]:
        """Names of the parts of the settings whose extensions are on."""


@runtime_checkable
class HasUnusedKeys(Protocol):
    """Settings with keys that have no effect beside the value of another."""

    @property
    def unused(self) -> dict[str, str]:
        """Keys without effect, below `agent.`, and why: the other key and its value."""


@runtime_checkable
class HasUnusedKeysInRuns(Protocol):
    """Settings with keys that have no effect in some environments, or in short runs."""

    def unused_in(self, spec: EnvSpec, total_steps: int) -> dict[str, str]:
        """Return keys without effect in such a run, below `agent.`, and why."""


@runtime_checkable
class WarnsOfRuns(Protocol):
    """Settings that warn of what one may not expect in some environments."""

    def warnings_in(self, spec: EnvSpec) -> list[str]:
        """Return lines about what one may not expect in such environments."""


def of_rank(settings: AgentSettings, rank: int, size: int) -> AgentSettings:
    """Return the settings of one of `size` ranks; raise SettingError if ranks are not supported."""
    if size == 1:
        return settings
    if not isinstance(settings, SupportsRanks):
        reason = (
            "trains in one process only (its settings have no of_rank): start it without torchrun"
        )
        raise SettingError("agent.name", settings.name, reason)
    return settings.of_rank(rank, size)


class Algorithm(NamedTuple):
    """Settings and module of an algorithm; the module, which needs torch, is imported on demand."""

    settings: type[AgentSettings]
    module: str
    cls: str
    defaults: Path | None = None  # YAML; None: see configs/agent
    # Module with `build_policy` and `build_sampling_policy`: the class's `policy` and
    # `sampling_policy` without importing learner or compiler. None: use the class.
    policy: str | None = None


class Sample(NamedTuple):
    """Options of a sampling actor: number of environments and seed."""

    num_envs: int
    seed: int


ALGORITHMS = {
    "dqn": Algorithm(
        DQNSettings, "steadyrl.agents.dqn.agent", "DQN", policy="steadyrl.agents.dqn.policy"
    ),
    "ppo": Algorithm(
        PPOSettings, "steadyrl.agents.ppo.agent", "PPO", policy="steadyrl.agents.ppo.policy"
    ),
}
# Extensions by algorithm and the part of its settings that switches them on, in order: each wraps
# the loss of those before it. Before PPO's teacher, a loss must accept the keyword `evaluate`.
EXTENSIONS = {
    ("dqn", "teacher"): ("steadyrl.agents.distillation.extension", "DQNTeacher"),
    ("dqn", "augmentation"): ("steadyrl.agents.dqn.augmentation", "RandomShift"),
    ("ppo", "teacher"): ("steadyrl.agents.distillation.extension", "PPOTeacher"),
    ("ppo", "rnd"): ("steadyrl.agents.rnd.extension", "PPORND"),
    ("ppo", "kl_learning_rate"): ("steadyrl.agents.ppo.kl_learning_rate", "KLLearningRate"),
}


def algorithm(name: str) -> Algorithm:
    """Return the algorithm called `name`, built-in or installed."""
    found = ALGORITHMS.get(name) or find_entry_point(name)
    if found is None:
        names = ", ".join([*ALGORITHMS, *sorted(entry_points(group=GROUP).names)])
        reason = f"no such agent; there are: {names}. One of another package needs it installed"
        raise SettingError("name", name, reason)
    return found


def algorithms_for(action: ActionSpec) -> list[str]:
    """Return the built-in algorithms that support actions of this kind."""
    kinds = {
        name: each.settings.action_kinds if isinstance(each.settings, LimitsActions) else (object,)
        for name, each in ALGORITHMS.items()
    }
    return [name for name, supported in kinds.items() if isinstance(action, supported)]


def validate_actions(settings: AgentSettings, spec: EnvSpec) -> None:
    """Refuse an environment whose kind of actions is not one of the algorithm's `action_kinds`."""
    if not isinstance(settings, LimitsActions) or isinstance(spec.action, settings.action_kinds):
        return
    *needed, given = (
        kind.__name__.removesuffix("Actions")
        for kind in (*settings.action_kinds, type(spec.action))
    )
    reason = f"needs {' or '.join(needed).lower()} actions, but {spec.id} has {given} actions"
    raise SettingError("agent", settings.name, reason)


def find_entry_point(name: str) -> Algorithm | None:
    """Return the installed algorithm of this name, if any."""
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
    validate_actions(settings, spec)
    common: dict[str, Any] = {"device": device, "seed": seed, "total_steps": total_steps}
    # Own arguments of the extensions that are on, by part of the settings.
    switched_on = {} if teacher is None else {"teacher": {"teacher": teacher}}
    if isinstance(settings, HasExtensions):
        switched_on |= {part: {} for part in settings.extensions}
    extensions = []
    for (name, part), (module, cls_name) in EXTENSIONS.items():
        if part in switched_on and isinstance(settings, ALGORITHMS[name].settings):
            extension = getattr(import_module(module), cls_name)
            extensions.append(extension(settings, spec, **common, **switched_on.pop(part)))
    if switched_on:
        reason = f"has no extension for {', '.join(switched_on)}, which its settings switch on"
        raise SettingError("agent.name", settings.name, reason)
    others: dict[str, Any] = {"extensions": extensions} if extensions else {}
    cls: Any = agent_class(settings.name)
    agent: Agent = cls(settings, spec, **common, **others)
    return agent


def agent_class(name: str) -> type[Agent]:
    """Import the agent class of the algorithm called `name`."""
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
    in_torch: bool = False,
) -> Actor:
    """Return an actor with the weights of a trained policy, as `Agent.weights` returned them.

    They include the statistics of the observation normaliser. The actor is greedy, for any
    number of environments, or samples actions as `sample` describes. `in_torch`: import no
    compiler; an algorithm without a `policy` module may do so.
    """
    module = algorithm(settings.name).policy if in_torch else None
    if module is None:
        cls = agent_class(settings.name)
        build: Any = cls.policy if sample is None else cls.sampling_policy
    else:
        found = import_module(module)
        build = found.build_policy if sample is None else found.build_sampling_policy
    drawn: dict[str, Any] = {} if sample is None else sample._asdict()
    actor: Actor
    network, actor = build(settings, spec, device, **drawn)
    own = network.state_dict()
    wrong = [f"{name} is missing" for name in own.keys() - weights.keys()]
    wrong += [f"{name} is unknown to the network" for name in weights.keys() - own.keys()]
    wrong += [
        f"{name} has shape {list(weights[name].shape)}, not {list(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    if wrong:
        raise ValueError(f"the weights do not fit this network: {'; '.join(sorted(wrong))}")
    for name, tensor in own.items():
        tensor.detach().copy_(weights[name])
    network.eval()  # of a package's network: ours have no layers that behave otherwise then
    return actor
