"""Memory monitoring behind one small interface for the training loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.cache_cleaner import CacheCleaner
from steadyrl.memory.gpu.snapshot import SnapshotAtEnd
from steadyrl.memory.leak import CUDA, HOST, LeakDetector
from steadyrl.memory.memory_scope import MemoryScope, ScopeTable
from steadyrl.memory.monitor import Monitor, Reading
from steadyrl.memory.process import MB, readable
from steadyrl.memory.settings import MemorySettings

log = logging.getLogger("steadyrl")

_LIMIT_CHECK_SECONDS = 0.05
_CENSUS_PATIENCE = 3 * 800
_PROFILE_STEPS = 10_000
_PROFILE_ROLLOUTS = 100


class MemoryWatch:
    """Monitor, leak detector, cache cleaner and memory limit of a run.

    The loop calls `on_…` after updates, episodes and rollouts (less than a microsecond each) and
    `measure` at each log interval. All of them raise MemoryBudgetError when the run reaches
    `memory.limit_mb`; `measure` also for a leak with `memory.leak.action=stop`.
    """

    def __init__(
        self,
        settings: MemorySettings,
        device: torch.device,
        *,
        buffers: Mapping[str, int] | None = None,
        holders: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        own_process: bool = True,
        snapshot: Path | None = None,
    ) -> None:
        """Start; what grew, and tensors that keep an autograd graph, are searched in `holders`.

        Without `own_process`, malloc's settings stay as they are. `snapshot`: the file of a
        profiled run for what is allocated when a card's memory ends.
        """
        self._settings, self._device, self._clock = settings, device, clock
        self._monitor = Monitor(settings.monitor, device, buffers or {}, clock)
        self._cleaner = CacheCleaner(
            settings.cache, device, self._monitor.rss, clock, own_process=own_process
        )
        self._detector = LeakDetector(settings.leak, self._census_is_affordable, holders or {})
        self._start = clock()
        self._limit = math.inf if settings.limit_mb is None else settings.limit_mb * MB
        self._next_limit_check = math.inf if settings.limit_mb is None else clock()
        self._profile = ScopeTable(settings, device, clock) if settings.profile else None
        on_card = snapshot if settings.profile and device.type == "cuda" else None
        self._snapshot = None if on_card is None else SnapshotAtEnd(on_card)
        self._holders = holders or {}
        self._next_sample = clock()
        self._profiled_step, self._rollouts = 0, 0
        self._learns = False

    def profile(self, blocks: Mapping[str, Sequence[tuple[Any, str]]]) -> None:
        """Measure calls of methods, each an owner and a name, by block; nothing without profile."""
        if self._profile is None:
            return
        for block, methods in blocks.items():
            scope = MemoryScope(block, device=self._device, report=self._profile.add)
            for owner, name in methods:
                setattr(owner, name, scope(getattr(owner, name)))

    def on_update(self, count: int = 1) -> None:
        """Count updates (0 is fine: call it once per iteration of the loop)."""
        if count and not self._learns:
            # The first update allocates memory of its own, for example a compiler's.
            self._learns = True
            self._cleaner.begin()
            self._detector.restart_warmup()
        self._cleaner.note("updates", count)
        self._check_limit()

    def on_episodes(self, count: int) -> None:
        """Count finished episodes."""
        if count:
            self._cleaner.note("episodes", count)
            self._check_limit()

    def on_rollout(self) -> None:
        """Count one finished rollout."""
        self._cleaner.note("rollouts", 1)
        self._rollouts += 1
        self._check_limit()

    def measure(self, step: int) -> dict[str, float]:
        """Return metrics by TensorBoard tag: RSS always, the others when due."""
        self._print_profile(step)
        now = self._clock()
        reading = None
        # A fast run logs a hundred times per second: sampling that often would slow it down.
        if now < self._next_sample:
            self._check_limit()
        else:
            self._next_sample = now + self._settings.monitor.every_seconds
            reading = self._monitor.sample()
        if reading is None:
            return {"memory/rss_mb": self._monitor.rss() / MB}
        self._validate_limit(reading.used)
        self._look_for_leaks(reading, step)
        scalars = self._monitor.scalars(reading)
        scalars["memory/growth_mb_per_million_steps"] = self._detector.slope(HOST)
        if reading.cuda is not None:
            scalars["memory/cuda_growth_mb_per_million_steps"] = self._detector.slope(CUDA)
        scalars["memory/cache_clear_ms"] = self._cleaner.cost.pop_milliseconds()
        return scalars

    def finish(self, step: int) -> None:
        """Print the profile of a run that ends, by an error too."""
        with suppress(RuntimeError, MemoryError):  # a device that failed gives no times any more
            self._print_profile(step, last=True)

    def close(self) -> None:
        """Stop tracing; may be called twice."""
        self._detector.close()
        if self._snapshot is not None:
            self._snapshot.close()

    def _check_limit(self) -> None:
        if self._next_limit_check == math.inf:
            return
        now = self._clock()
        if now >= self._next_limit_check:
            self._next_limit_check = now + _LIMIT_CHECK_SECONDS
            self._validate_limit(self._monitor.used())

    def _validate_limit(self, used: int) -> None:
        # The estimate is cheap but inexact; a run is stopped only after an exact measurement.
        if used < self._limit or self._monitor.refresh_tree() < self._limit:
            return
        self._cleaner.clean()
        used = self._monitor.refresh_tree()
        if used >= self._limit:
            raise MemoryBudgetError(
                f"the run uses {readable(used)} and memory.limit_mb={self._settings.limit_mb:g} "
                "is reached: raise it, or lower agent.replay.capacity or env.num_envs"
            )

    def _census_is_affordable(self) -> bool:
        # A census takes about three times as long as counting tensors; one per run.
        if not self._settings.monitor.every_seconds:
            return True
        return self._clock() - self._start >= _CENSUS_PATIENCE * self._monitor.tensors.cost

    def _look_for_leaks(self, reading: Reading, step: int) -> None:
        warnings = [self._detector.observe_bytes(HOST, step, reading.heap)]
        if reading.cuda is not None:
            warnings.append(self._detector.observe_bytes(CUDA, step, reading.cuda.allocated))
        if reading.tree_is_new:
            warnings += self._detector.observe_tree(reading.tree, step)
        else:
            warnings += self._detector.observe_workers(reading.workers, step)
        for warning in filter(None, warnings):
            if self._settings.leak.action == "stop":
                raise MemoryBudgetError(warning)
            log.warning(warning)

    def _print_profile(self, step: int, *, last: bool = False) -> None:
        if self._profile is None or step == self._profiled_step:
            return
        since = step - self._profiled_step
        if last or since >= _PROFILE_STEPS or self._rollouts >= _PROFILE_ROLLOUTS:
            log.info(self._profile.text(f"to step {step:,}", **self._holders))
            self._profiled_step, self._rollouts = step, 0
