"""Build the environments that the settings ask for, with the backend that runs them fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from envs.atari import AtariSimulator, probe_atari
from envs.batch import BatchBackend, Simulator
from envs.envpool import EnvPoolSimulator, probe_envpool
from envs.faults import WorkerError, told
from envs.making import ATARI, NOT_ATARI, brings_its_module, find_spec
from envs.native import NativeSimulator, probe_native
from envs.processes import ProcessBackend
from envs.settings import BackendName, EnvSettings
from envs.single import SingleEnv
from envs.sync import SyncBackend
from envs.types import EnvironmentFailedError, EnvSpec
from envs.vector import Backend, VectorEnv
from envs.worker_handle import ask_process, describe_in_process
from memory.errors import ExpectedError, SettingError
from memory.process import usable_cores

log = logging.getLogger("steadyrl")

SIMULATORS: dict[str, Callable[..., Simulator]] = {
    "native": NativeSimulator,
    "ale": AtariSimulator,
    "envpool": EnvPoolSimulator,
}
# From this many environments on, one batch of array operations beats the plain loop.
NATIVE_FROM = 8
# What a process costs per step. A step that is cheaper is done sooner than it is handed over.
ROUND_TRIP_SECONDS = 150e-6


def build_env(
    settings: EnvSettings, *, seed: int, num_envs: int | None = None, purpose: str = "training"
) -> VectorEnv:
    """Build the vector environment; `num_envs` replaces the number in the settings."""
    count = settings.num_envs if num_envs is None else num_envs
    with _making(settings, EnvironmentFailedError):
        name, reason = choose_backend(settings, count)
        log.info("%s: backend %s for %d x %s: %s", purpose, name, count, settings.id, reason)
        return VectorEnv(_backend(name, settings, seed, count), frame_stack=settings.frame_stack)


def _backend(name: str, settings: EnvSettings, seed: int, num_envs: int) -> Backend:
    if name in SIMULATORS:
        simulator = SIMULATORS[name](settings, num_envs=num_envs)
        return BatchBackend(simulator, settings, seed=seed)
    kind = ProcessBackend if name == "async" else SyncBackend
    return kind(settings, seed=seed, num_envs=num_envs)


def probe(settings: EnvSettings) -> EnvSpec:
    """Say what the environment offers, building at most one copy and closing it again.

    What an environment raises is refused like any wrong setting, what would have ended this
    process is a failure. What may run in processes is not made in this one.
    """
    with _making(settings, SettingError):
        name = choose_backend(settings, 1).backend
        if name == "sync" and _may_become_async(settings):
            name = "async"
        found = PROBES.get(name, _probe_here)(settings)
    return replace(found, num_envs=settings.num_envs, frame_stack=settings.frame_stack)


def _probe_here(settings: EnvSettings) -> EnvSpec:
    env = SingleEnv(settings, seed=0, index=0)
    try:
        env.build()
        return env.spec(num_envs=1)
    finally:
        env.close()


PROBES: dict[str, Callable[[EnvSettings], EnvSpec]] = {
    "async": describe_in_process,
    "native": probe_native,
    "ale": probe_atari,
    "envpool": probe_envpool,
}


@contextmanager
def _making(settings: EnvSettings, kind: type[ExpectedError]) -> Iterator[None]:
    """Say in one line why an environment cannot be made; `kind` is for ordinary exceptions."""
    try:
        yield
    except (ExpectedError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raised = error.raised if isinstance(error, WorkerError) else isinstance(error, Exception)
        what = f"cannot be made: {told(error)}"
        if raised and kind is SettingError:
            raise SettingError("id", settings.id, what) from error
        raise EnvironmentFailedError(f"{settings.id} {what}") from error


class Choice(NamedTuple):
    """A backend and why it is used."""

    backend: BackendName
    reason: str


def choose_backend(settings: EnvSettings, num_envs: int) -> Choice:
    """Return the backend to use; with `auto` the fastest."""
    backend = settings.backend
    if backend == "envpool" or (backend == "async" and brings_its_module(settings.id)):
        return Choice(backend, "as set")
    spec = find_spec(settings.id)
    if spec.entry_point == ATARI:
        if backend not in ("auto", "ale"):
            raise SettingError("backend", backend, NOT_ATARI)
        return Choice("ale", "an Atari game")
    if backend != "auto":
        return Choice(backend, "as set")
    if num_envs >= NATIVE_FROM and spec.vector_entry_point is not None:
        return Choice("native", f"{num_envs} environments in one batch")
    return _sync_or_async(settings, num_envs)


def _may_become_async(settings: EnvSettings) -> bool:
    """Tell whether the environments may have processes, as long as none was tried."""
    parallel = settings.num_envs > 1 and usable_cores() > 1
    return settings.backend == "async" or (settings.backend == "auto" and parallel)


def _sync_or_async(settings: EnvSettings, num_envs: int) -> Choice:
    if num_envs == 1 or usable_cores() == 1:
        return Choice("sync", "nothing to run in parallel")
    try:
        seconds = step_seconds(settings)
    except WorkerError as error:  # the backend itself knows what to do about faults
        if error.raised:
            return Choice("sync", f"the trial failed: {error}")
        return Choice("async", f"in the trial {error}")
    backend: BackendName = "async" if seconds > ROUND_TRIP_SECONDS else "sync"
    return Choice(backend, f"a step takes {seconds * 1e6:,.0f} µs")


def step_seconds(settings: EnvSettings) -> float:
    """Measure in a process what a step takes; rows are the same whatever is chosen."""
    return float(ask_process(settings, trial=True))
