"""What a configuration calls a teacher, a policy's place or `module:name`, and who that is.

Torch is imported only where one is found, because names are read before anything slow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.registry import AgentSettings
from agents.teacher_settings import TeacherSettings
from envs.types import DiscreteActions, EnvSpec
from memory.errors import SettingError, with_place
from training.manifest import CheckpointError
from training.typed import show

if TYPE_CHECKING:
    import torch

    from agents.teacher import Teacher


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


def find_teacher(settings: AgentSettings, spec: EnvSpec, device: torch.device) -> Teacher | None:
    """Return the teacher that the settings name, if they name one."""
    if not isinstance(settings, TeacherSettings) or settings.teacher is None:
        return None
    if is_module(settings.teacher):
        return _object(settings.teacher, spec)
    return _policy(settings.teacher, spec, device)


def _object(name: str, spec: EnvSpec) -> Teacher:
    from agents.teacher import ObjectTeacher
    from envs.wrapping import import_foreign

    module, _, attribute = name.rpartition(":")
    found: Any = import_foreign(module, "agent.teacher", name)
    if not hasattr(found, attribute):
        raise SettingError("agent.teacher", name, f"{module} has no {attribute or 'name'}")
    found = getattr(found, attribute)
    if isinstance(found, type):
        try:
            found = found()
        except Exception as error:  # foreign code
            raise SettingError(
                "agent.teacher", name, f"cannot be built: {with_place(error)}"
            ) from error
    act = getattr(found, "act", None)
    if not callable(act):
        raise SettingError("agent.teacher", name, "has no act(obs)")
    return ObjectTeacher(name, spec.action, act)


def _policy(name: str, spec: EnvSpec, device: torch.device) -> Teacher:
    import torch

    from agents.actor_critic import ActorCritic
    from agents.teacher import PolicyTeacher
    from training.identity import acting, plain_spec, read_policy
    from training.policies import Policy, refuse_other_spaces
    from training.summary import weights_hash

    found = read_policy(Path(name))
    try:
        trained = found.facts.get("spec", {})
        sees_masks = bool(trained.get("mask"))
        offered = plain_spec(spec if sees_masks else spec.unmasked)
        refuse_other_spaces(Policy(found.path, found.facts), spec.id, offered, trained)
    except SettingError as error:
        raise SettingError("agent.teacher", name, error.reason) from None
    if not all(bool(torch.isfinite(weight).all()) for weight in found.weights.values()):
        raise SettingError("agent.teacher", name, "has weights that are not finite")
    network, actor, _ = acting(found, device)
    network.requires_grad_(False)
    logits = isinstance(network, ActorCritic) and isinstance(spec.action, DiscreteActions)
    return PolicyTeacher(
        name,
        spec.action,
        network.deciding if isinstance(network, ActorCritic) and logits else actor.decide,
        logits=logits,
        sha256=weights_hash(found.weights),
        sees_masks=sees_masks,
    )
