"""Choose the backend that runs an environment fastest."""

from __future__ import annotations

from typing import NamedTuple

from envs.atari import ENTRY_POINT as ATARI
from envs.faults import WorkerError
from envs.making import brings_its_module, find_spec
from envs.processes import ask_process
from envs.settings import Backend, EnvSettings
from envs.slot import NOT_ATARI
from memory.errors import SettingError
from memory.process import usable_cores

# From this many environments on, one batch of array operations beats the plain loop.
NATIVE_FROM = 8
# What a process costs per step. A step that is cheaper is done sooner than it is handed over.
ROUND_TRIP_SECONDS = 150e-6


class Choice(NamedTuple):
    """A backend and why it is used."""

    backend: Backend
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


def may_become_async(settings: EnvSettings) -> bool:
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
    backend: Backend = "async" if seconds > ROUND_TRIP_SECONDS else "sync"
    return Choice(backend, f"a step takes {seconds * 1e6:,.0f} µs")


def step_seconds(settings: EnvSettings) -> float:
    """Measure in a process what a step takes; rows are the same whatever is chosen."""
    return float(ask_process(settings, trial=True))
