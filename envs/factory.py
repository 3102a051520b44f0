"""Build the vector environment with the configured or the fastest backend."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from steadyrl.core.errors import ExpectedError, SettingError, interrupt_kept, is_out_of_memory
from steadyrl.envs.backends.atari import AtariBackend
from steadyrl.envs.backends.batch import BatchBackend, VectorEntryPoint
from steadyrl.envs.backends.envpool import EnvPoolBackend
from steadyrl.envs.backends.single_env import SingleEnv
from steadyrl.envs.backends.subprocess import ProcessBackend
from steadyrl.envs.backends.sync import SyncBackend
from steadyrl.envs.backends.worker_handle import query_subprocess, read_description
from steadyrl.envs.encoding.masks import require_masks
from steadyrl.envs.faults import WorkerError, error_summary
from steadyrl.envs.kernels.api import changed_source, find_kernel
from steadyrl.envs.registration import ATARI, MINATAR, NOT_ATARI, find_spec, imports_module
from steadyrl.envs.settings import BackendName, EnvSettings, EvaluationSettings, RenderSettings
from steadyrl.envs.types import EnvironmentFailedError, EnvSpec, Watch
from steadyrl.envs.vector import Backend, VectorEnv
from steadyrl.memory.process import usable_cores

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec as GymSpec

    from steadyrl.envs.backends.kernel import KernelBackend

log = logging.getLogger("steadyrl")


def _kernel_backend(settings: EnvSettings, seed: int) -> KernelBackend:
    from steadyrl.envs.backends.kernel import KernelBackend  # imports Numba

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
    "batch": VectorEntryPoint,
    "ale": AtariBackend,
    "envpool": EnvPoolBackend,
}
BATCH_BACKENDS = ("kernel", "batch", "ale", "envpool")  # step all environments as one batch
# From this many environments on, one batch of array operations beats a Python loop.
BATCH_FROM = 8
# Overhead per step of a worker process. Cheaper environments are faster in this process.
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


def build_watched_env(
    settings: EnvSettings, watch: Watch, *, seed: int, num_envs: int
) -> tuple[VectorEnv, Callable[[NDArray[Any]], NDArray[Any]]]:
    """Build environments in this process, with the steps that `build_env`'s have.

    `watch` gets their observations before they are encoded. The function returned gives actions
    [N, …] as the environments get them.
    """
    settings = replace(settings, num_envs=num_envs)
    with _setting_errors(settings, EnvironmentFailedError):
        name, _ = choose_backend(settings)
        batch = name in BATCH_BACKENDS and name != "kernel"
        kind: Any = BACKENDS[name] if batch else SyncBackend
        backend: SyncBackend | BatchBackend = kind(settings, seed=seed)
        backend.watch(watch)
        env = VectorEnv(backend, frame_stack=settings.frame_stack)
        return env, backend.env_actions


def build_render_env(settings: RenderSettings, *, seed: int) -> VectorEnv:
    """Build one environment that renders, in its own process: rendering may crash or hang."""
    if settings.backend == "envpool":
        raise SettingError("backend", "envpool", "EnvPool's environments cannot render")
    with _setting_errors(settings, EnvironmentFailedError):
        choose_backend(settings)  # raises the same SettingErrors as training
        return VectorEnv(ProcessBackend(settings, seed=seed), frame_stack=settings.frame_stack)


def probe(settings: EnvSettings) -> EnvSpec:
    """Return the environment's spec; builds at most one copy and closes it again.

    An exception of the environment becomes a SettingError; a crash, hang or exit becomes an
    EnvironmentFailedError. Environments that may run in processes are never built in this one.
    """
    with _setting_errors(settings, SettingError):
        one: EnvSettings = EvaluationSettings(**{**vars(settings), "num_envs": 1})
        name, _ = choose_backend(one)
        remarks: list[str] = []
        if name == "kernel":
            if find_kernel(one).masks and one.action_masks == "auto":
                log.warning(
                    f"{one.id} provides action masks, env.backend=kernel does not: all actions are "
                    "treated as allowed (as with env.action_masks=false)"
                )
            one = one.with_masks(False)
        elif one.action_masks == "true":
            one = replace(one, action_masks="auto")  # detect it, then check below
        if name == "async" or (name == "sync" and _may_become_async(settings)):
            described = read_description(query_subprocess(one))
            found, remarks = described.spec, described.remarks
        elif name == "kernel" and find_spec(one.id).entry_point == MINATAR:
            found = _kernel_backend(one, seed=0).spec  # importing MinAtar takes longer than Numba
        elif name in ("sync", "kernel"):  # the spec of a kernel needs no compilation
            with contextlib.closing(SingleEnv(one, seed=0, index=0)) as env:
                env.build()
                found = replace(env.spec(), spaces=env.described_spaces())
                remarks = env.remarks
        else:
            with contextlib.closing(BACKENDS[name](one, seed=0)) as backend:
                found = backend.spec
        require_masks(settings, found)
    for remark in remarks:
        log.warning("%s: %s", one.id, remark)
    return replace(found, num_envs=settings.num_envs, frame_stack=settings.frame_stack)


@contextlib.contextmanager
def _setting_errors(settings: EnvSettings, kind: type[ExpectedError]) -> Iterator[None]:
    """Convert errors while building to one-line errors; ordinary exceptions become `kind`."""
    try:
        with interrupt_kept():
            yield
    except (ExpectedError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if is_out_of_memory(error):  # not this environment's fault
            raise
        raised = error.raised if isinstance(error, WorkerError) else isinstance(error, Exception)
        what = f"cannot be built: {error_summary(error)}"
        if raised and kind is SettingError:
            raise SettingError("id", settings.id, what) from error
        raise EnvironmentFailedError(f"{settings.role}{settings.id} {what}") from error


def choose_backend(settings: EnvSettings) -> tuple[BackendName, str]:
    """Return the backend to use (`auto`: the fastest) and the reason for the log."""
    name, why = _fastest(settings)
    if settings.needs_single_envs and name in BATCH_BACKENDS:
        batch = f"backend {name} steps all environments as one batch"
        if not settings.wrappers:
            reason = f"{batch}, without action masks"
            raise SettingError("action_masks", "true", reason)
        reason = f"{batch}, which cannot be wrapped"
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
        return "kernel", "compiled, same steps as sync"
    name, why = _without_kernel(settings, spec)
    changed = changed_source(settings)
    return name, f"{why}; {changed}" if changed else why


def _without_kernel(settings: EnvSettings, spec: GymSpec) -> tuple[BackendName, str]:
    if spec.entry_point is None and spec.vector_entry_point is not None:
        return "batch", f"{settings.id} is registered as a vector environment only"
    batched = settings.num_envs >= BATCH_FROM and not settings.needs_single_envs
    if not batched or spec.vector_entry_point is None:
        return _sync_or_async(settings)
    reason = _why_no_batch(settings)
    if not reason:
        return "batch", f"{settings.num_envs} environments in one batch"
    name, why = _sync_or_async(settings)
    return name, f"{why}; backend batch cannot run them: {reason}"


def _has_kernel(settings: EnvSettings) -> bool:
    """Return whether a kernel supports these settings, action masks included."""
    try:
        kernel = find_kernel(settings)
    except SettingError:
        return False
    return not settings.needs_single_envs and not (kernel.masks and settings.action_masks == "auto")


def _why_no_batch(settings: EnvSettings) -> str:
    """Return why Gymnasium's vector environment cannot be used; "" if it can.

    It is third-party code and may raise anything; then single environments are used.
    """
    try:
        with contextlib.closing(BACKENDS["batch"](settings, seed=0)):
            return ""
    except SettingError as error:
        return error.reason
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        return error_summary(error)


def _may_become_async(settings: EnvSettings) -> bool:
    """Return whether the backend may turn out to be async, before the step time is measured."""
    parallel = settings.num_envs > 1 and usable_cores() > 1
    return settings.backend == "async" or (settings.backend == "auto" and parallel)


def _sync_or_async(settings: EnvSettings) -> tuple[BackendName, str]:
    if settings.num_envs == 1 or usable_cores() == 1:
        return "sync", "nothing to run in parallel"
    try:
        seconds = step_seconds(settings)
    except WorkerError as error:  # the backend handles faults itself
        if error.raised:
            return "sync", f"measuring a step failed: {error}"
        return "async", f"while measuring a step: {error}"
    backend: BackendName = "async" if seconds > PROCESS_ROUND_TRIP_SECONDS else "sync"
    return backend, f"a step takes {seconds * 1e6:,.0f} µs"


def step_seconds(settings: EnvSettings) -> float:
    """Measure the seconds per step, in a process; the choice does not change the results."""
    return float(query_subprocess(settings, trial=True))
