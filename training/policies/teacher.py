"""Load the teacher that `agent.teacher.policy` names: a policy directory or `module:name`.

Torch is imported only if there is one, because settings are checked before slow imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadyrl.agents.registry import AgentSettings
from steadyrl.agents.settings import DistillationSettings
from steadyrl.core.errors import SettingError, with_place
from steadyrl.envs.types import DiscreteActions, EnvSpec, plain_spec
from steadyrl.training.config.teacher_names import KEY, is_module

if TYPE_CHECKING:
    import torch

    from steadyrl.agents.distillation.teacher import Teacher


def find_teacher(settings: AgentSettings, spec: EnvSpec, device: torch.device) -> Teacher | None:
    """Return the teacher that the settings name; None without one."""
    if not isinstance(settings, DistillationSettings) or settings.teacher.policy is None:
        return None
    if is_module(settings.teacher.policy):
        return _object(settings.teacher.policy, spec)
    return _policy(settings.teacher.policy, spec, device)


def _object(name: str, spec: EnvSpec) -> Teacher:
    from steadyrl.agents.distillation.teacher import ObjectTeacher
    from steadyrl.envs.wrappers import import_user_module

    module, _, attribute = name.rpartition(":")
    found: Any = import_user_module(module, KEY, name)
    if not hasattr(found, attribute):
        raise SettingError(KEY, name, f"{module} has no {attribute or 'name after the colon'}")
    found = getattr(found, attribute)
    if isinstance(found, type):
        try:
            found = found()
        except Exception as error:  # user code
            raise SettingError(KEY, name, f"cannot be built: {with_place(error)}") from error
    act = getattr(found, "act", None)
    if not callable(act):
        raise SettingError(KEY, name, "has no act(obs)")
    return ObjectTeacher(name, spec.action, act)


def _policy(name: str, spec: EnvSpec, device: torch.device) -> Teacher:
    import torch

    from steadyrl.agents.distillation.teacher import PolicyTeacher
    from steadyrl.agents.networks.actor_critic import ActorCritic
    from steadyrl.training.checkpoints.summary import weights_hash
    from steadyrl.training.policies.find import validate_same_spaces
    from steadyrl.training.policies.policy import build_policy, read_policy

    found = read_policy(Path(name))
    try:
        trained = found.metadata.get("spec", {})
        sees_masks = bool(trained.get("mask"))
        offered = plain_spec(spec if sees_masks else spec.unmasked)
        validate_same_spaces(found, spec.id, offered, trained)
    except SettingError as error:
        raise SettingError(KEY, name, error.reason) from None
    if not all(bool(torch.isfinite(weight).all()) for weight in found.weights.values()):
        raise SettingError(KEY, name, "has weights that are not finite")
    try:
        network, actor, _ = build_policy(found, device)
    except SettingError as error:
        reason = f"{error.reason}, which a teacher cannot have"
        raise SettingError(KEY, name, reason) from None
    network.requires_grad_(False)
    logits = isinstance(network, ActorCritic) and isinstance(spec.action, DiscreteActions)
    return PolicyTeacher(
        name,
        spec.action,
        network.policy_params if isinstance(network, ActorCritic) and logits else actor.decide,
        logits=logits,
        sha256=weights_hash(found.weights),
        sees_masks=sees_masks,
    )
