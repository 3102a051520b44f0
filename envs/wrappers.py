"""User code named in the configuration: modules to import, and environment wrappers."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import wrappers

from steadyrl.core.errors import (
    SettingError,
    describe,
    did_you_mean,
    is_out_of_memory,
    one_line,
    with_place,
)
from steadyrl.envs.settings import MODULE_NAME, WrapperSpec

NUMPY = "observations and actions are arrays of NumPy"
# Wrappers of Gymnasium that conflict with the training loop → why, and what to use instead.
UNSUPPORTED = {
    "Autoreset": "environments reset on the step after an episode's end",
    "NormalizeObservation": "evaluation would have statistics of its own; use agent.normalize_obs",
    "NormalizeReward": "scores would no longer be raw returns; use agent.normalize_reward",
    "RecordVideo": "use eval.video_every, or evaluate with --video",
    "RenderCollection": "frames would accumulate in memory",
    "HumanRendering": "evaluate with --watch",
    **dict.fromkeys(("ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"), NUMPY),
}
# Lower-case names are modules.
KNOWN = [name for name in wrappers.__all__ if name[0].isupper() and name not in UNSUPPORTED]


def wrap(env: gym.Env[Any, Any], wrapping: tuple[WrapperSpec, ...]) -> gym.Env[Any, Any]:
    """Apply wrappers to an environment, the first one innermost."""
    for each in wrapping:
        try:
            wrapper = _find(each.name)
            wrapped = wrapper(env, **_arguments(wrapper, copy.deepcopy(each.arguments)))
        except SettingError:
            raise
        except Exception as error:  # wrong arguments in the configuration, or a bug in user code
            raise SettingError("wrappers", each.name, with_place(error)) from error
        if not isinstance(wrapped, gym.Env):
            raise SettingError(
                "wrappers", each.name, f"returned a {type(wrapped).__name__}, not a gym.Env"
            )
        env = wrapped
    return env


def _find(name: str) -> Any:
    """Return the wrapper class: a name in gymnasium.wrappers, or `module:Class`."""
    module, colon, attribute = name.rpartition(":")
    if colon:
        found = getattr(import_user_module(module, "wrappers", name), attribute, None)
        if not callable(found):
            raise SettingError("wrappers", name, f"{module} has no class {attribute}")
        if isinstance(found, type) and found.__module__.startswith(wrappers.__name__):
            _validate_supported(found.__name__)
        return found
    _validate_supported(name)
    if name not in KNOWN:
        raise SettingError("wrappers", name, f"not in gymnasium.wrappers; {_instead(name)}")
    return getattr(wrappers, name)


def _validate_supported(name: str) -> None:
    """Raise SettingError for a wrapper of Gymnasium's that conflicts with the training loop."""
    if name in UNSUPPORTED:
        raise SettingError("wrappers", name, f"cannot be used: {UNSUPPORTED[name]}")


def _instead(name: str) -> str:
    """Return a hint for a name that is no wrapper of Gymnasium's."""
    module, dot, last = name.rpartition(".")
    if dot:
        return f"write {last if module == wrappers.__name__ else f'{module}:{last}'}"
    return did_you_mean(name, KNOWN, cutoff=0.5) or (
        f"one of your own is written module:{name}; there are: {', '.join(KNOWN)}"
    )


def _arguments(wrapper: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as the wrapper takes them.

    Lists become tuples or arrays where its signature has those, and `module:name` what it names
    unless the signature has text.
    """
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(wrapper).parameters
    except (TypeError, ValueError):  # callables without a signature
        parameters = {}
    return {key: _argument(parameters.get(key), value) for key, value in given.items()}


def _argument(parameter: inspect.Parameter | None, value: Any) -> Any:
    annotation = "" if parameter is None else inspect.formatannotation(parameter.annotation)
    default = None if parameter is None else parameter.default
    if isinstance(value, list) and ("tuple" in annotation.lower() or isinstance(default, tuple)):
        return _as_tuple(value)
    if isinstance(value, list) and "ndarray" in annotation.lower():
        return np.array(value)
    takes_text = re.search(r"\bstr\b", annotation) or isinstance(default, str)
    if isinstance(value, str) and MODULE_NAME.fullmatch(value) and not takes_text:
        module, _, name = value.rpartition(":")
        found = import_user_module(module, "wrappers", value)
        if not hasattr(found, name):
            raise SettingError("wrappers", value, f"{module} has no {name}")
        return getattr(found, name)
    return value


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def import_user_module(module: str, field: str, value: str) -> ModuleType:
    """Import a module named in a setting; raise SettingError with the setting's name on failure."""
    if module.endswith(".py") or "/" in module:
        named = module.removesuffix(".py").strip("./").replace("/", ".")
        named = value.replace(module, named)
        raise SettingError(field, value, f"names a file, not a module: write {named}")
    if not module or not all(part.isidentifier() for part in module.split(".")):
        raise SettingError(field, value, "must be module:name")
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may do anything
        if is_out_of_memory(error):
            raise
        what = describe(error)
        if isinstance(error, ModuleNotFoundError):
            what = str(error)
            if error.name and f"{module}.".startswith(f"{error.name}."):
                what += f"; {_search_path()}"
        elif isinstance(error, SyntaxError):  # its own text repeats file and line
            what = f"SyntaxError: {error.msg}"
        reason = f"cannot import {module}: {what}{_where(error)}"
        raise SettingError(field, value, one_line(reason)) from error


def _search_path() -> str:
    """Return where Python looks for modules."""
    here = os.getcwd()
    current = f"the current directory ({here}), " if {here, ""} & set(sys.path) else ""
    return f"modules are found in {current}PYTHONPATH and installed packages"


def _where(error: BaseException) -> str:
    """Return ' (file, line n)' of the failed import, or '' if it failed outside user code."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    ours = (__file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if f.filename not in ours and not f.filename.startswith("<frozen")]
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
