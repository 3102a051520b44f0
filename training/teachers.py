"""Find the teacher that the settings name, and refuse one that cannot teach here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agents.actor_critic import ActorCritic
from agents.registry import AgentSettings
from agents.teacher import ObjectTeacher, PolicyTeacher, Teacher
from agents.teacher_settings import TeacherSettings
from envs.foreign import import_foreign
from envs.types import DiscreteActions, EnvSpec
from memory.errors import SettingError, describe
from training.identity import acting, plain_spec, read_policy
from training.policies import Policy, refuse_other_spaces
from training.summary import weights_hash
from training.teacher_names import is_module


def find_teacher(settings: AgentSettings, spec: EnvSpec, device: torch.device) -> Teacher | None:
    """Return the teacher that the settings name, if they name one."""
    if not isinstance(settings, TeacherSettings) or settings.teacher is None:
        return None
    if is_module(settings.teacher):
        return _object(settings.teacher, spec)
    return _policy(settings.teacher, spec, device)


def _object(name: str, spec: EnvSpec) -> Teacher:
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
                "agent.teacher", name, f"cannot be built: {describe(error)}"
            ) from error
    act = getattr(found, "act", None)
    if not callable(act):
        raise SettingError("agent.teacher", name, "has no act(obs)")
    return ObjectTeacher(name, spec.action, act)


def _policy(name: str, spec: EnvSpec, device: torch.device) -> Teacher:
    found = read_policy(Path(name))
    try:
        trained = found.facts.get("spec", {})
        refuse_other_spaces(Policy(found.path, found.facts), spec.id, plain_spec(spec), trained)
    except SettingError as error:
        raise SettingError("agent.teacher", name, error.reason) from None
    if not all(bool(torch.isfinite(weight).all()) for weight in found.weights.values()):
        raise SettingError("agent.teacher", name, "has weights that are not finite")
    network, actor, _ = acting(found, device)
    network.requires_grad_(False)
    told: dict[str, Any] = {"logits": False, "sha256": weights_hash(found.weights)}
    if isinstance(network, ActorCritic) and isinstance(spec.action, DiscreteActions):
        return PolicyTeacher(name, spec.action, network.deciding, **told | {"logits": True})
    return PolicyTeacher(name, spec.action, actor.decide, **told)
