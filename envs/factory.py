"""Build the environments that the settings ask for, with the backend that runs them fastest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from steadyrl.core.errors import ExpectedError, SettingError, is_out_of_memory
from steadyrl.envs.backends.atari import AtariBackend
from steadyrl.envs.backends.envpool import EnvPoolBackend
from steadyrl.envs.backends.native import NativeBackend
from steadyrl.envs.backends.single_env import SingleEnv
from steadyrl.envs.backends.subprocess import ProcessBackend
from steadyrl.envs.backends.sync import SyncBackend
from steadyrl.envs.backends.worker_handle import query_subprocess, read_description
from steadyrl.envs.encoding.masks import require_masks
from steadyrl.envs.faults import WorkerError, error_summary
from steadyrl.envs.kernels.api import changed_source, find_kernel
from steadyrl.envs.registration import ATARI, MINATAR, NOT_ATARI, find_spec, imports_module
from steadyrl.envs.settings import BackendName, EnvSettings, EvaluationSettings, RenderSettings
from steadyrl.envs.types import EnvironmentFailedError, EnvSpec
from steadyrl.envs.vector import Backend, VectorEnv
from steadyrl.memory.process import usable_cores

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec as GymSpec

    from steadyrl.envs.backends.kernel import KernelBackend

log = logging.getLogger("steadyrl")


def _kernel_backend(settings: EnvSettings, seed: int) -> KernelBackend:
    from steadyrl.envs.backends.kernel import KernelBackend  # it needs the compiler

    return KernelBackend(settings, seed=seed)


def _kernel_vector_env(settings: EnvSettings, seed: int) -> VectorEnv:
    from steadyrl.envs.backends.kernel_block import KernelVectorEnv  # likewise

    stack, checked = settings.frame_stack, settings.checked
    return KernelVectorEnv(
        _kernel_backend(settings, seed), frame_stack=stack, check_pixel_range=checked
    )


BACKENDS: dict[str, Callable[..., Backend]] = {
    "sync": SyncBackend,
    "async": ProcessBackend,
    "native": NativeBackend,
    "ale": AtariBackend,
    "envpool": EnvPoolBackend,
}
BATCH_BACKENDS = ("kernel", "native", "ale", "envpool")  # make no single environments
# From this many environments on, one batch of array operations beats the plain loop.
NATIVE_FROM = 8
# What a process costs per step. A step that is cheaper is done sooner than it is handed over.
PROCESS_ROUND_TRIP_SECONDS = 150e-6


def build_env(
    settings: EnvSettings, *, seed: int, num_envs: int | None = None, purpose: str = "training"
) -> VectorEnv:
    """Build the vector environment; `num_envs` replaces the number in the settings."""
    settings = replace(settings, num_envs=num_envs or settings.num_envs)
    with _setting_errors(settings, EnvironmentFailedError):
        name, why = choose_backend(settings)
        n = settings.num_envs
        log.info("%s: backend %s for %d x %s: %s", purpose, name, n, settings.id, why)
        if name == "kernel":
            return _kernel_vector_env(settings, seed)
        backend, stack = BACKENDS[name](settings, seed=seed), settings.frame_stack
        return VectorEnv(backend, frame_stack=stack, check_pixel_range=settings.checked)


def build_render_env(settings: RenderSettings, *, seed: int) -> VectorEnv:
    """Build one environment that is looked at, in a process: whatever draws may break or hang."""
    if settings.backend == "envpool":
        raise SettingError("backend", "envpool", "EnvPool's environments draw no pictures")
    with _setting_errors(settings, EnvironmentFailedError):
        choose_backend(settings)  # refuses what training would
        return VectorEnv(ProcessBackend(settings, seed=seed), frame_stack=settings.frame_stack)


def probe(settings: EnvSettings) -> EnvSpec:
    """Say what the environment offers, building at most one copy and closing it again.

    What an environment raises is refused like any wrong setting, what would have ended this
    process is a failure. What may run in processes is not made in this one.
    """
    with _setting_errors(settings, SettingError):
        one: EnvSettings = EvaluationSettings(**{**vars(settings), "num_envs": 1})
        name, _ = choose_backend(one)
        if name == "kernel":
            if find_kernel(one).masks and one.action_masks == "auto":
                log.warning(
                    f"{one.id} says which actions it allows, which env.backend=kernel does not: "
                    "all are taken as allowed (as with env.action_masks=false)"
                )
            one = one.with_masks(False)
        elif one.action_masks == "true":
            one = replace(one, action_masks="auto")  # it is seen whether it does
        if name == "async" or (name == "sync" and _may_become_async(settings)):
            found = read_description(query_subprocess(one), one).spec
        elif name == "kernel" and find_spec(one.id).entry_point == MINATAR:
            found = _kernel_backend(
                one, seed=0
            ).spec  # its own takes longer to import than the compiler
        elif name in ("sync", "kernel"):  # which needs no compiler to say that
            with contextlib.closing(SingleEnv(one, seed=0, index=0)) as env:
                env.build()
                found = env.spec()
        else:
            with contextlib.closing(BACKENDS[name](one, seed=0)) as backend:
                found = backend.spec
        require_masks(settings, found)
    return replace(found, num_envs=settings.num_envs, frame_stack=settings.frame_stack)


@contextlib.contextmanager
def _setting_errors(settings: EnvSettings, kind: type[ExpectedError]) -> Iterator[None]:
    """Say in one line why an environment cannot be made; `kind` is for ordinary exceptions."""
    try:
        yield
    except (ExpectedError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if is_out_of_memory(error):  # there is too little for any environment
            raise
        raised = error.raised if isinstance(error, WorkerError) else isinstance(error, Exception)
        what = f"cannot be made: {error_summary(error)}"
        if raised and kind is SettingError:
            raise SettingError("id", settings.id, what) from error
        raise EnvironmentFailedError(f"{settings.role}{settings.id} {what}") from error


def choose_backend(settings: EnvSettings) -> tuple[BackendName, str]:
    """Return the backend to use, with `auto` the fastest, and why."""
    name, why = _fastest(settings)
    if settings.needs_single_envs and name in BATCH_BACKENDS:
        batch = f"backend {name} steps all environments as one batch"
        if not settings.wrappers:
            reason = f"{batch}, which says of none what it allows"
            raise SettingError("action_masks", "true", reason)
        reason = f"{batch}, which nothing is put around"
        raise SettingError("wrappers", settings.wrapping[0].name, reason)
    return name, why


def _fastest(settings: EnvSettings) -> tuple[BackendName, str]:
    backend = settings.backend
    if backend == "envpool" or (backend == "async" and imports_module(settings.id)):
        return backend, "as set"
    if backend == "kernel":
        find_kernel(settings)
        return backend, "as set"
    spec = find_spec(settings.id)
    if spec.entry_point == ATARI:
        if backend not in ("auto", "ale"):
            raise SettingError("backend", backend, NOT_ATARI)
        return "ale", "an Atari game"
    if backend != "auto":
        return backend, "as set"
    if _has_kernel(settings):
        return "kernel", "compiled, with the rows of sync"
    name, why = _without_kernel(settings, spec)
    changed = changed_source(settings)
    return name, f"{why}; {changed}" if changed else why


def _without_kernel(settings: EnvSettings, spec: GymSpec) -> tuple[BackendName, str]:
    batched = settings.num_envs >= NATIVE_FROM and not settings.needs_single_envs
    if not batched or spec.vector_entry_point is None:
        return _sync_or_async(settings)
    reason = _why_no_batch(settings)
    if not reason:
        return "native", f"{settings.num_envs} environments in one batch"
    name, why = _sync_or_async(settings)
    return name, f"{why}; as one batch they cannot be made: {reason}"


def _has_kernel(settings: EnvSettings) -> bool:
    """Tell whether a kernel runs the environments under these settings, masks and all."""
    try:
        kernel = find_kernel(settings)
    except SettingError:
        return False
    return not settings.needs_single_envs and not (kernel.masks and settings.action_masks == "auto")


def _why_no_batch(settings: EnvSettings) -> str:
    """Say why the vector environment does not take these settings or keep our time; "" if it does.

    It is other people's code, which may raise anything; single environments are made without it.
    """
    try:
        with contextlib.closing(BACKENDS["native"](settings, seed=0)):
            return ""
    except SettingError as error:
        return error.reason
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        return error_summary(error)


def _may_become_async(settings: EnvSettings) -> bool:
    """Tell whether the environments may have processes, as long as none was tried."""
    parallel = settings.num_envs > 1 and usable_cores() > 1
    return settings.backend == "async" or (settings.backend == "auto" and parallel)


def _sync_or_async(settings: EnvSettings) -> tuple[BackendName, str]:
    if settings.num_envs == 1 or usable_cores() == 1:
        return "sync", "nothing to run in parallel"
    try:
        seconds = step_seconds(settings)
    except WorkerError as error:  # the backend itself knows what to do about faults
        if error.raised:
            return "sync", f"the trial failed: {error}"
        return "async", f"in the trial {error}"
    backend: BackendName = "async" if seconds > PROCESS_ROUND_TRIP_SECONDS else "sync"
    return backend, f"a step takes {seconds * 1e6:,.0f} µs"


def step_seconds(settings: EnvSettings) -> float:
    """Measure in a process what a step takes; rows are the same whatever is chosen."""
    return float(query_subprocess(settings, trial=True))
