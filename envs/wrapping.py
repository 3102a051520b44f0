"""Wrappers around one environment: Gymnasium's by name, somebody's own by module and class."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium import wrappers

from envs.foreign import import_foreign
from envs.settings import Wrapping
from memory.errors import SettingError, describe, nearest

NUMPY = "observations and actions are arrays of NumPy"
# Those of Gymnasium that would break a promise, and what keeps it.
REFUSED = {
    "Autoreset": "environments reset on the step after an episode's end",
    "NormalizeObservation": "evaluation would have statistics of its own; use agent.normalize_obs",
    "NormalizeReward": "scores would be no returns any more; use agent.normalize_reward",
    "RecordVideo": "use eval.video_every, or evaluate with --video",
    "RenderCollection": "pictures would pile up in memory",
    "HumanRendering": "evaluate with --watch",
    **dict.fromkeys(("ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"), NUMPY),
}
# What is in lower case is no wrapper but a module.
KNOWN = [name for name in wrappers.__all__ if name[0].isupper() and name not in REFUSED]


def wrap(env: gym.Env[Any, Any], wrapping: tuple[Wrapping, ...]) -> gym.Env[Any, Any]:
    """Put wrappers around an environment, the first of them innermost."""
    for each in wrapping:
        try:
            wrapped = _find(each.name)(env, **each.arguments)
        except SettingError:
            raise
        except Exception as error:  # it is told what somebody typed
            raise SettingError("wrappers", each.name, describe(error)) from error
        if not isinstance(wrapped, gym.Env):
            raise SettingError(
                "wrappers", each.name, f"made a {type(wrapped).__name__}, no gym.Env"
            )
        env = wrapped
    return env


def _find(name: str) -> Any:
    """Return a wrapper of Gymnasium's, or what `module:Class` names."""
    module, colon, attribute = name.rpartition(":")
    if colon:
        found = getattr(import_foreign(module, "wrappers", name), attribute, None)
        if not callable(found):
            raise SettingError("wrappers", name, f"{module} has no class {attribute}")
        return found
    if name in REFUSED:
        raise SettingError("wrappers", name, f"cannot be used: {REFUSED[name]}")
    if name not in KNOWN:
        hint = nearest(name, KNOWN)
        raise SettingError("wrappers", name, f"no wrapper of Gymnasium's; {hint}")
    return getattr(wrappers, name)
