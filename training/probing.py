"""See what the environment offers, and whether the agent is to know which actions it allows."""

from __future__ import annotations

from dataclasses import replace

from agents.registry import Masking
from envs.factory import probe
from envs.types import EnvSpec
from memory.errors import SettingError
from training.settings import Settings


def probed(settings: Settings) -> tuple[Settings, EnvSpec]:
    """Return what the environment offers, and the settings that say whether there are masks."""
    env = settings.run.env
    if not (isinstance(settings.agent, Masking) and settings.agent.takes_masks):
        if env.action_masks == "true":
            reason = f"agent {settings.agent.name} knows nothing of masks"
            raise SettingError("env.action_masks", "true", reason)
        env = env.with_masks(False)
    try:
        spec = probe(env)
    except SettingError as error:
        raise SettingError(f"env.{error.field}", error.value, error.reason) from None
    run = replace(settings.run, env=env.with_masks(spec.mask > 0))
    return replace(settings, run=run), spec
