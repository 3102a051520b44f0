"""Choose the backend that runs an environment fastest."""

from __future__ import annotations

import logging
import os
import statistics
import time

from envs.atari import ENTRY_POINT as ATARI
from envs.making import find_spec
from envs.rows import Rows
from envs.settings import Backend, EnvSettings
from envs.slot import EnvSlot
from memory.errors import SettingError

LOG = logging.getLogger("steadyrl")

# From this many environments on, one batch of array operations beats the plain loop.
NATIVE_FROM = 8
# What a process costs per step. A step that is cheaper is done sooner than it is handed over.
ROUND_TRIP_SECONDS = 150e-6
TRIAL_STEPS = 20
TRIAL_SECONDS = 0.1


def choose_backend(settings: EnvSettings, num_envs: int) -> str:
    """Return the backend to use; where the choice is ours, say what it is."""
    backend = settings.backend
    if backend == "envpool":
        return backend
    spec = find_spec(settings.id)
    if spec.entry_point == ATARI:
        if backend not in ("auto", "ale"):
            raise SettingError("backend", backend, "Atari games run with ale or envpool")
        return "ale"
    if backend != "auto":
        return backend
    if num_envs >= NATIVE_FROM and spec.vector_entry_point is not None:
        backend, reason = "native", f"{num_envs} environments in one batch"
    else:
        backend, reason = _sync_or_async(settings, num_envs)
    LOG.info("backend %s for %d x %s: %s", backend, num_envs, settings.id, reason)
    return backend


def _sync_or_async(settings: EnvSettings, num_envs: int) -> tuple[Backend, str]:
    if num_envs == 1 or _cores() == 1:
        return "sync", "nothing to run in parallel"
    try:
        seconds = step_seconds(settings)
    except SettingError:
        raise
    except Exception as error:  # the backend itself knows what to do about faults
        return "sync", f"the trial failed with {type(error).__name__}"
    backend: Backend = "async" if seconds > ROUND_TRIP_SECONDS else "sync"
    return backend, f"a step takes {seconds * 1e6:,.0f} µs"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_seconds(settings: EnvSettings) -> float:
    """Measure what one step of the environment takes; rows are the same whatever is chosen."""
    slot = EnvSlot(settings, seed=0, index=0)
    times: list[float] = []
    try:
        slot.build()
        rows = Rows(slot.spec(num_envs=1))
        end = time.perf_counter() + TRIAL_SECONDS
        while len(times) < TRIAL_STEPS and (not times or time.perf_counter() < end):
            resets = slot.over
            begin = time.perf_counter()
            slot.advance(slot.any_action(), rows)
            if not resets:
                times.append(time.perf_counter() - begin)
    finally:
        slot.close()
    return statistics.median(times)
