"""Registry of kernel environments; imports no compiler."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from gymnasium import Env
from gymnasium.envs.registration import EnvSpec as GymSpec

from steadyrl.core.errors import SettingError
from steadyrl.envs.kernels.kernel import Kernel as Kernel  # re-exported for user kernels
from steadyrl.envs.kernels.sources import changed_module
from steadyrl.envs.registration import (
    LIMIT,
    MINATAR,
    MINATAR_GAMES,
    NO_LIMIT,
    find_spec,
    time_limit,
)
from steadyrl.envs.settings import EnvSettings


@dataclass(frozen=True)
class KernelEntry:
    """Entry point for registering a kernel with Gymnasium; also makes single environments of it.

    `make` takes the environment's keyword arguments and returns a `Kernel`.
    """

    make: Callable[..., Kernel]

    def __call__(self, **kwargs: Any) -> Env[Any, Any]:
        """Make one ordinary Gymnasium environment, for every other backend."""
        from steadyrl.envs.kernels.single import KernelEnv

        return KernelEnv(self.make(**kwargs))


class BuiltinKernel(NamedTuple):
    """The built-in kernel of a Gymnasium environment, and the keyword arguments it supports."""

    module: str
    name: str
    keywords: tuple[str, ...] = ()
    masks: bool = False  # the original environment provides action masks; kernels do not

    def make(self, **kwargs: Any) -> Kernel:
        """Import and build the kernel (imports Numba)."""
        kernel: Kernel = getattr(importlib.import_module(self.module), self.name)(**kwargs)
        return kernel


CLASSIC = "gymnasium.envs.classic_control."

TABLES = "gymnasium.envs.toy_text."

# By entry point, not by id: another environment registered under the same id gets no kernel.
BUILTIN_KERNELS = {
    f"{CLASSIC}cartpole:CartPoleEnv": BuiltinKernel(
        "steadyrl.envs.kernels.cartpole", "cartpole", ("sutton_barto_reward",)
    ),
    f"{CLASSIC}acrobot:AcrobotEnv": BuiltinKernel("steadyrl.envs.kernels.acrobot", "acrobot"),
    f"{CLASSIC}mountain_car:MountainCarEnv": BuiltinKernel(
        "steadyrl.envs.kernels.mountain_car", "mountain_car", ("goal_velocity",)
    ),
    f"{CLASSIC}continuous_mountain_car:Continuous_MountainCarEnv": BuiltinKernel(
        "steadyrl.envs.kernels.mountain_car", "mountain_car_continuous", ("goal_velocity",)
    ),
    f"{CLASSIC}pendulum:PendulumEnv": BuiltinKernel(
        "steadyrl.envs.kernels.pendulum", "pendulum", ("g",)
    ),
    f"{TABLES}frozen_lake:FrozenLakeEnv": BuiltinKernel(
        "steadyrl.envs.kernels.tabular",
        "frozen_lake",
        ("desc", "map_name", "is_slippery", "success_rate", "reward_schedule"),
    ),
    f"{TABLES}cliffwalking:CliffWalkingEnv": BuiltinKernel(
        "steadyrl.envs.kernels.tabular", "cliff_walking", ("is_slippery",)
    ),
    MINATAR: BuiltinKernel(
        "steadyrl.envs.kernels.minatar.game",
        "minatar",
        ("game", "use_minimal_action_set", "sticky_action_prob", "difficulty_ramping"),
    ),
    f"{TABLES}taxi:TaxiEnv": BuiltinKernel(
        "steadyrl.envs.kernels.tabular", "taxi", ("is_rainy", "rainy_probability"), masks=True
    ),
}

OTHERS = "use env.backend=sync"


class UserKernel(NamedTuple):
    """The kernel of an environment registered with a `KernelEntry`."""

    make: Callable[..., Kernel]
    keywords: Collection[str]
    masks: bool = False


class KernelChoice(NamedTuple):
    """The kernel for given settings, not imported yet."""

    make: Callable[[], Kernel]
    limit: int  # steps per episode; 0: no limit
    masks: bool  # as `BuiltinKernel.masks`


def find_kernel(settings: EnvSettings) -> KernelChoice:
    """Return the kernel of an environment; SettingError if there is none for these settings."""
    spec = find_spec(settings.id)
    kernel = _kernel_of(spec)
    if kernel is None or spec.additional_wrappers:
        raise SettingError("backend", "kernel", f"{settings.id} has no kernel; use auto")
    if settings.info_metrics:
        what = f"kernels have no info; {OTHERS}"
        raise SettingError("info_metrics", list(settings.info_metrics), what)
    _validate_images(settings, spec)
    kwargs = {**spec.kwargs, **settings.kwargs}
    limit = time_limit(kwargs)
    kwargs.pop(LIMIT, None)
    limit = spec.max_episode_steps or NO_LIMIT if limit is None else limit
    if changed := changed_source(settings):
        raise SettingError("backend", "kernel", f"{changed}; {OTHERS}")
    for key in kwargs:
        # With desc=None FrozenLake generates a random map per environment.
        if key not in kernel.keywords or kwargs[key] is None:
            what = f"the kernel of {settings.id} does not support this; {OTHERS}"
            raise SettingError(f"kwargs.{key}", kwargs[key], what)
    return KernelChoice(lambda: kernel.make(**copy.deepcopy(kwargs)), max(limit, 0), kernel.masks)


def changed_source(settings: EnvSettings) -> str | None:
    """Return a message if the installed environment's code differs from the kernel's original."""
    spec = find_spec(settings.id)
    entry = spec.entry_point
    if not isinstance(entry, str) or entry not in BUILTIN_KERNELS:
        return None
    changed = changed_module(_sources(spec, entry.partition(":")[0], settings))
    if changed is None:
        return None
    return f"the kernel of {settings.id} reproduces another version than the installed {changed}"


def _sources(spec: GymSpec, module: str, settings: EnvSettings) -> tuple[str, ...]:
    """Return the modules that define an environment's behaviour."""
    if spec.entry_point == MINATAR:
        game = {**spec.kwargs, **settings.kwargs}.get("game")
        games = [f"minatar.environments.{game}"] if game in MINATAR_GAMES.values() else []
        return module, "minatar.environment", *games
    shared = (f"{TABLES}utils",) if module.startswith(TABLES) else ()
    return module, "gymnasium.utils.seeding", *shared


def _validate_images(settings: EnvSettings, spec: GymSpec) -> None:
    """Raise SettingError for image settings other than the kernel's own encoding."""
    images, written = settings.images, {"auto"}
    if isinstance(spec.entry_point, str):
        written.add("hwc" if spec.entry_point == MINATAR else "vector")
    what = f"the kernel of {settings.id} has a fixed encoding of observations; {OTHERS}"
    if images.axes not in written:
        raise SettingError("image_axes", images.axes, what)
    if images.range is not None:
        raise SettingError("image_range", list(images.range), what)


def _kernel_of(spec: GymSpec) -> BuiltinKernel | UserKernel | None:
    """Return the kernel of a Gymnasium spec; None: it has none."""
    entry = spec.entry_point
    if isinstance(entry, KernelEntry):
        return UserKernel(entry.make, inspect.signature(entry.make).parameters)
    return BUILTIN_KERNELS.get(entry) if isinstance(entry, str) else None
