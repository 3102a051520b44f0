"""Find and make one Gymnasium environment; failures become one-line SettingErrors."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import current_process
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as GymSpec

from steadyrl.core.command.typed import install_command
from steadyrl.core.errors import SettingError, at_place, is_out_of_memory, nearest, one_line
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.wrappers import import_user_module, wrap

# Packages that register environments: prefix of the id → (module, extra that installs it).
PROVIDERS = {"ALE/": ("ale_py", "atari"), "MinAtar/": ("minatar", "minatar")}
ATARI = "ale_py.env:AtariEnv"  # entry point of Atari games
NOT_ATARI = "Atari games run with ale or envpool"
MINATAR = "minatar.gym:BaseEnv"
MINATAR_GAMES = {
    "Asterix": "asterix",
    "Breakout": "breakout",
    "Freeway": "freeway",
    "Seaquest": "seaquest",
    "SpaceInvaders": "space_invaders",
}
SURELY_MEANT = 0.8  # similarity of a known id, from which on no other hint is needed
LIMIT = "max_episode_steps"  # keyword argument of gymnasium.make
NO_LIMIT = -1  # Gymnasium's value for no limit
MAX_LIMIT = 2**31 - 1
WORKER = "environment-"  # begins the names of environments' processes
GYM_ABSENT = (
    " with Gymnasium; it registers with gym, its predecessor, which is not installed: write a "
    "gymnasium.Env around its class, and register that"
)
UNTYPED = "values that cannot be typed go into gymnasium.register(…, kwargs=…) in a module of yours"
ONLY_HERE = (
    "is registered in this program only, not in the process that an environment gets on macOS, or "
    "once a GPU is in use: write the module that registers it too, as module:"
)
EXTRAS_BY_ENTRY_POINT = {"gymnasium.envs.box2d": "box2d", "gymnasium.envs.mujoco": "mujoco"}


class FreshStickyAction(gym.Wrapper[Any, Any, Any, Any]):
    """Clears MinAtar's last action on reset: a sticky action would leak into the next episode."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the game and its last action."""
        observation, info = self.env.reset(**kwargs)
        game: Any = self.unwrapped
        game.game.last_action = 0
        return observation, info


def find_spec(env_id: str) -> GymSpec:
    """Return the registered spec of an id; imports the package that registers it if necessary."""
    _register_provider(env_id)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a newer version exists": the user's choice
            name = _import_id_module(env_id)
            if name not in gym.registry and importlib.util.find_spec("ale_py") is not None:
                register_provider("ale_py")  # also registers ids without a prefix
            return gym.spec(name)
    except gym.error.Error as error:
        old = isinstance(error, gym.error.DeprecatedEnv)
        what = "deprecated" if old else "no such environment"
        known = dict(gym.registry)
        if current_process().name.startswith(WORKER) and not imports_module(env_id):
            raise SettingError("id", env_id, f"{ONLY_HERE}{env_id}, or env.backend=sync") from None
        if imports_module(env_id):  # the module's own ids only: Gymnasium's are not meant
            module = env_id.partition(":")[0]
            known = {name: spec for name, spec in known.items() if _is_of(spec, module)}
            unregistered = _unregistered_class(env_id, known)
            if unregistered:
                reason = f"{what}: {unregistered}"
            elif not known:
                reason = f"{what}: {module} registers no such id{_old_gym(env_id)}"
            else:
                named = [f"{module}:{name}" for name in sorted(known)]
                reason = f"{what}, {nearest(env_id, named)}"
            raise SettingError("id", env_id, reason) from None
        raise SettingError("id", env_id, f"{what}, {nearest_id(env_id, known)}") from None


def _unregistered_class(env_id: str, known: Mapping[str, GymSpec]) -> str:
    """Return how to register the class that an id `module:Class` names; "": it needs no such hint.

    `known`: the specs that the module has registered.
    """
    module, _, name = env_id.rpartition(":")
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, type) or not issubclass(found, gym.Env):
        return ""
    entries = {found, f"{module}:{name}", f"{found.__module__}:{found.__qualname__}"}
    if any(spec.entry_point in entries for spec in known.values()):
        return ""
    return (
        f'{module} has a class {name}: add gym.register("{name}-v0", {name}) there and write '
        f"env.id={module}:{name}-v0"
    )


def _old_gym(env_id: str) -> str:
    """Return a hint if a module may have registered its ids with Gymnasium's predecessor."""
    if sys.modules.get("gym") is None:
        return GYM_ABSENT if _imports_gym(env_id.partition(":")[0]) else ""
    made = f'env_id: "{env_id}", make_kwargs: {{disable_env_checker: true}}'
    return (
        " with Gymnasium; if it does with gym, its predecessor, use shimmy: "
        f"env.id=shimmy:GymV26Environment-v0 'env.kwargs={{{made}}}'"
    )


def _imports_gym(module: str) -> bool:
    """Return whether an imported module's own file imports Gymnasium's predecessor."""
    with suppress(OSError, TypeError):  # it has no source
        source = inspect.getsource(sys.modules[module])
        return re.search(r"^\s*(import gym\b|from gym\b)", source, re.MULTILINE) is not None
    return False


def _is_of(spec: GymSpec, module: str) -> bool:
    entry = spec.entry_point or spec.vector_entry_point
    where = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return where.partition(":")[0].partition(".")[0] == module.partition(".")[0]


def imports_module(env_id: str) -> bool:
    """Return whether an id has the form `module:Env-v0`."""
    return ":" in env_id


def make_env(settings: EnvSettings, render_mode: str | None = None) -> gym.Env[Any, Any]:
    """Make one environment; missing packages and unknown keywords become SettingErrors."""
    spec = find_spec(settings.id)
    if spec.entry_point is None and spec.vector_entry_point is not None:
        reason = "is a vector environment only (vector_entry_point): it needs env.backend=batch, "
        raise SettingError("id", settings.id, f"{reason}without wrappers, masks or videos")
    if spec.max_episode_steps is not None:
        # All callers reset before stepping; OrderEnforcing costs 4 % of CartPole's time. Without a
        # time limit the wrapper stays, because the checks of first steps need an outer wrapper.
        spec = replace(spec, order_enforce=False)
    drawn: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kwargs = copy.deepcopy(settings.kwargs | drawn)  # environments may change theirs
            env = gym.make(spec, disable_env_checker=True, **kwargs)
            env = FreshStickyAction(env) if spec.entry_point == MINATAR else env
            return wrap(env, settings.wrapping)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        if is_out_of_memory(error):
            raise
        raise SettingError("id", settings.id, _missing_dependency(spec, error)) from None
    except TypeError as error:
        named = unknown_keyword(settings, error) or _missing_keywords(spec, settings, error)
        raise named or _tuples_wanted(settings, error) or error from None


def time_limit(kwargs: Mapping[str, Any]) -> int | None:
    """Return the configured time limit: steps, NO_LIMIT, or None (the environment's own)."""
    limit = kwargs.get(LIMIT)
    if limit is not None and (type(limit) is not int or limit < NO_LIMIT or limit == 0):
        raise SettingError(f"kwargs.{LIMIT}", limit, "must be a positive integer, or -1")
    return limit


def explicit_time_limit(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of keyword arguments, with a number even for no time limit."""
    limit = time_limit(kwargs)
    rest = {key: copy.deepcopy(value) for key, value in kwargs.items() if key != LIMIT}
    return rest if limit is None else rest | {LIMIT: MAX_LIMIT if limit == NO_LIMIT else limit}


def unknown_keyword(settings: EnvSettings, error: TypeError) -> SettingError | None:
    """Return the SettingError for an unknown keyword argument; None for another TypeError."""
    found = re.search(r"unexpected keyword argument '([^']+)'", str(error))
    if found is None or found[1] not in settings.kwargs:
        return None
    key = found[1]
    return SettingError(
        f"kwargs.{key}", settings.kwargs[key], f"{settings.id} has no such keyword argument"
    )


def _missing_keywords(
    spec: GymSpec, settings: EnvSettings, error: TypeError
) -> SettingError | None:
    """Return the SettingError for arguments that the environment's class requires, or None."""
    entry = spec.entry_point
    name = entry.rpartition(":")[2] if isinstance(entry, str) else getattr(entry, "__name__", "")
    found = re.match(
        rf"{re.escape(name)}\.__init__\(\) missing \d+ required .*?arguments?: (.+?) was raised",
        str(error),
    )
    if found is None:
        return None
    return SettingError("kwargs", settings.kwargs, f"{settings.id} needs {found[1]}; {UNTYPED}")


def _tuples_wanted(settings: EnvSettings, error: TypeError) -> SettingError | None:
    """Return the SettingError for lists in place of tuples, which cannot be typed, or None."""
    if "tuple" not in str(error) or "[" not in str(settings.kwargs):
        return None
    reason = f"{settings.id} may need tuples in place of lists ({one_line(str(error))}); {UNTYPED}"
    return SettingError("kwargs", settings.kwargs, reason)


def _register_provider(env_id: str) -> None:
    for prefix, (module, extra) in PROVIDERS.items():
        if not env_id.startswith(prefix):
            continue
        if importlib.util.find_spec(module) is None:
            reason = f"needs {module}, install it with: {install_command(extra)}"
            raise SettingError("id", env_id, reason)
        if env_id not in gym.registry:
            register_provider(module)


def register_provider(module: str) -> None:
    """Register the environments of one installed provider."""
    if module != "minatar":
        gym.register_envs(importlib.import_module(module))
        return
    # The same ids as MinAtar registers, without its import (a second and 100 MB for plotting),
    # which kernels do not need.
    for name, game in MINATAR_GAMES.items():
        for version, least in (("v0", False), ("v1", True)):
            kwargs = {"game": game, "use_minimal_action_set": least}
            gym.register(f"MinAtar/{name}-{version}", entry_point=MINATAR, kwargs=kwargs)


def _import_id_module(env_id: str) -> str:
    """Import the module of `module:Env-v0` and return the id without it."""
    module, colon, name = env_id.rpartition(":")
    if not colon:
        return env_id
    if not name:
        raise SettingError("id", env_id, "must be module:id")
    import_user_module(module, "id", env_id)
    return name


def nearest_id(env_id: str, known_ids: Iterable[str]) -> str:
    """Return a hint with the most similar known id, or with how an own module's id is written."""
    own = _own_module(env_id)
    if own:
        return own
    wanted = env_id.lower()
    known = {name.lower(): name for name in known_ids}
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    if not near:  # compare without versions, which dominate short names
        bare = {low.rpartition("-v")[0] or low: low for low in known}
        near = [bare[m] for m in difflib.get_close_matches(wanted, bare, n=1, cutoff=0.6)]
    yours = f"One that your module registers is written module:{env_id}"
    if not near:
        return f"is the package that registers it installed? {yours}"
    alike = difflib.SequenceMatcher(None, wanted, near[0]).ratio() > SURELY_MEANT
    return f"did you mean {known[near[0]]}?" + ("" if alike else f" {yours}")


def _own_module(env_id: str) -> str:
    """Return a hint for an id that names a module without a colon: mine.Tank-v0, mine/Tank-v0."""
    dotted, dot, name = env_id.rpartition(".")
    if dot and all(part.isidentifier() for part in dotted.split(".")):
        return f"write {dotted}:{name}: the module, a colon, and the id that it registers"
    package, slash, _ = env_id.partition("/")
    if (
        slash
        and package.isidentifier()
        and (package in sys.modules or importlib.util.find_spec(package) is not None)
    ):
        return f"write {package}:{env_id} to import {package}, which registers it"
    return ""


def _missing_dependency(spec: GymSpec, error: Exception) -> str:
    entry = str(spec.entry_point)
    for prefix, extra in EXTRAS_BY_ENTRY_POINT.items():
        if entry.startswith(prefix):
            return f"needs {extra}, install it with: {install_command(extra)}"
    return f"cannot be built: {at_place(str(error), error)}"
