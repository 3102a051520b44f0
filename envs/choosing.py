"""Choose the backend that runs an environment fastest."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from envs.atari import ENTRY_POINT as ATARI
from envs.making import find_spec
from envs.rows import Rows
from envs.settings import Backend, EnvSettings
from envs.slot import EnvSlot
from memory.errors import SettingError
from memory.process import usable_cores

# From this many environments on, one batch of array operations beats the plain loop.
NATIVE_FROM = 8
# What a process costs per step. A step that is cheaper is done sooner than it is handed over.
ROUND_TRIP_SECONDS = 150e-6
TRIAL_STEPS = 20
TRIAL_SECONDS = 0.1


class Choice(NamedTuple):
    """A backend and why it is used."""

    backend: Backend
    reason: str


def choose_backend(settings: EnvSettings, num_envs: int) -> Choice:
    """Return the backend to use; with `auto` the fastest."""
    backend = settings.backend
    if backend == "envpool":
        return Choice(backend, "as set")
    spec = find_spec(settings.id)
    if spec.entry_point == ATARI:
        if backend not in ("auto", "ale"):
            raise SettingError("backend", backend, "Atari games run with ale or envpool")
        return Choice("ale", "an Atari game")
    if backend != "auto":
        return Choice(backend, "as set")
    if num_envs >= NATIVE_FROM and spec.vector_entry_point is not None:
        return Choice("native", f"{num_envs} environments in one batch")
    return _sync_or_async(settings, num_envs)


def _sync_or_async(settings: EnvSettings, num_envs: int) -> Choice:
    if num_envs == 1 or usable_cores() == 1:
        return Choice("sync", "nothing to run in parallel")
    try:
        seconds = step_seconds(settings)
    except SettingError:
        raise
    except Exception as error:  # the backend itself knows what to do about faults
        return Choice("sync", f"the trial failed with {type(error).__name__}")
    backend: Backend = "async" if seconds > ROUND_TRIP_SECONDS else "sync"
    return Choice(backend, f"a step takes {seconds * 1e6:,.0f} µs")


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
