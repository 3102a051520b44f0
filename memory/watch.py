"""Memory monitoring behind one small interface for the training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.bounds import Bounds
from steadyrl.memory.budget import LEARNING_BYTES, TRAINING_BYTES, enough_for, shown
from steadyrl.memory.cache_cleaner import CacheCleaner
from steadyrl.memory.gpu.snapshot import SnapshotAtEnd
from steadyrl.memory.host.pressure import Pressure
from steadyrl.memory.leak import CUDA, HOST, LeakDetector
from steadyrl.memory.limit.holders import Holders
from steadyrl.memory.limit.limit import MemoryLimit
from steadyrl.memory.limit.meters import BoundsMeter, Level, OwnMeter, nearest
from steadyrl.memory.memory_scope import MemoryScope, ScopeTable
from steadyrl.memory.monitor import Monitor, Reading
from steadyrl.memory.process import MB, readable
from steadyrl.memory.settings import MemorySettings

log = logging.getLogger("steadyrl")

_CENSUS_PATIENCE = 3 * 800
_PROFILE_STEPS = 10_000
_COPIES = 2  # of the networks and the optimiser, while a checkpoint and a policy are saved
_PROFILE_ROLLOUTS = 100
_RSS_SECONDS = 0.05  # between two readings: a fast run logs two hundred times per second


class Peaks(NamedTuple):
    """Most bytes used by a run: by its process tree, swap included, and on its card."""

    tree: int
    cuda: int | None


class MemoryWatch:
    """Monitor, leak detector, cache cleaner and memory limit of a run.

    The loop calls `on_…` after updates, episodes and rollouts, `check` after each step (less than a
    microsecond each), and `measure` at each log interval. `check` raises MemoryBudgetError when the
    run reaches `memory.limit_mb`; `measure` for a leak with `memory.leak.action=stop`.
    """

    def __init__(
        self,
        settings: MemorySettings,
        device: torch.device,
        *,
        buffers: Mapping[str, int] | None = None,
        host_buffers: Mapping[str, int] | None = None,
        holders: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        own_process: bool = True,
        find_error: Callable[[], MemoryBudgetError | None] = lambda: None,
        snapshot: Path | None = None,
    ) -> None:
        """Start; what grew, and tensors that keep an autograd graph, are searched in `holders`.

        `buffers`: bytes of the large parts; `host_buffers`: of those in host memory (None: all).
        `find_error` returns what others found, such as a worker that the kernel killed. Without
        `own_process`, malloc and its pages stay as they are. `snapshot`: the file of a profiled run
        for what is allocated when a card's memory ends.
        """
        self._settings, self._device, self._clock = settings, device, clock
        self._monitor = Monitor(
            settings.monitor, device, buffers or {}, clock, own_process=own_process
        )
        self._cleaner = CacheCleaner(
            settings.cache, device, self._monitor.rss, clock, own_process=own_process
        )
        self._detector = LeakDetector(settings.leak, self._census_is_affordable, holders or {})
        self._pressure = Pressure()
        self._start = clock()
        on_host = dict(buffers or {}) if host_buffers is None else dict(host_buffers)
        self._meters = self._build_meters(_COPIES * (buffers or {}).get("networks", 0))
        self._limit = MemoryLimit(
            None if settings.limit_mb is None else self._meters[0],
            clean=self._cleaner.clean,
            kept=self._monitor.kept,
            holders=Holders(self._monitor, on_host, self._detector.growers),
            clock=clock,
        )
        self._profile = ScopeTable(settings, device, clock) if settings.profile else None
        on_card = snapshot if settings.profile and device.type == "cuda" else None
        self._snapshot = None if on_card is None else SnapshotAtEnd(on_card)
        self._holders, self._host_buffers = holders or {}, on_host
        self._find_error = find_error
        self._next_sample = self._next_rss = clock()
        self._rss = 0  # bytes, read between full samples
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
            self._limit.begin()
        self._cleaner.note("updates", count)
        self._raise_found()

    def check(self) -> None:
        """Look at the memory limit, if that is due.

        Called once a step, after everything in it that may take memory: the limit is judged by what
        the next step will take, so nothing may follow before the run is saved.
        """
        self._limit.check()

    def pop_save_request(self) -> bool:
        """Return once whether a checkpoint is to be saved because the limit is near."""
        wanted, self._limit.wants_save = self._limit.wants_save, False
        return wanted

    def on_episodes(self, count: int) -> None:
        """Count finished episodes."""
        if count:
            self._cleaner.note("episodes", count)
            self._raise_found()

    def on_rollout(self) -> None:
        """Count one finished rollout."""
        self._cleaner.note("rollouts", 1)
        self._rollouts += 1

    def measure(self, step: int) -> dict[str, float]:
        """Return metrics by TensorBoard tag: RSS always, the others when due."""
        self._raise_found()
        self._print_profile(step)
        now = self._clock()
        reading = None
        # A fast run logs a hundred times per second: sampling that often would slow it down.
        if now >= self._next_sample:
            self._next_sample = now + self._settings.monitor.every_seconds
            reading = self._monitor.sample()
        if reading is None:
            if now >= self._next_rss:
                self._next_rss, self._rss = now + _RSS_SECONDS, self._monitor.rss()
            return {"memory/rss_mb": self._rss / MB}
        self._look_for_leaks(reading, step)
        for warning in self._pressure.warnings(reading.tree.swap):
            log.warning(warning)
        scalars = self._monitor.scalars(reading)
        level = self.nearest_limit()
        if level is not None:
            scalars["memory/available_mb"] = max(0, level.free) / MB
        scalars["memory/growth_mb_per_million_steps"] = self._detector.slope(HOST)
        if reading.cuda is not None:
            scalars["memory/cuda_growth_mb_per_million_steps"] = self._detector.slope(CUDA)
        scalars["memory/cache_clear_ms"] = self._cleaner.cost.pop_milliseconds()
        return scalars

    @property
    def cleaned(self) -> tuple[int, float]:
        """How often caches were cleaned, and how many MB that gave back."""
        cost = self._cleaner.cost
        return cost.times, cost.returned / MB

    def finish(self, step: int) -> None:
        """Print the profile of a run that ends, by an error too."""
        with suppress(RuntimeError, MemoryError):  # a device that failed gives no times any more
            self._print_profile(step, last=True)

    @property
    def held(self) -> int:
        """Bytes that the run's processes hold now; 0 if that cannot be read."""
        return self._monitor.kept()

    def nearest_limit(self) -> Level | None:
        """Return the limit that leaves least; None if none can be read."""
        return nearest(meter.read() for meter in self._meters)

    def validate_room(self) -> None:
        """Raise MemoryBudgetError if a set limit is reached before the first step.

        Also if the buffers leave less of it than learning takes. Other bounds are known when
        buffers are built (`budget.require`). Small buffers are not to blame: where the limit leaves
        little, it ends the run once it is reached.
        """
        if not isinstance(self._settings.limit_mb, float | int):
            return
        level = self._meters[0].confirm()
        held = {name: size for name, size in self._host_buffers.items() if name != "networks"}
        if level is None or level.free >= LEARNING_BYTES:
            return
        missing, total = LEARNING_BYTES - level.free, sum(held.values())
        if total >= LEARNING_BYTES and missing < total:
            names = " and ".join(
                f"{readable(size)} of {shown(name)}" for name, size in held.items()
            )
            raise MemoryBudgetError(
                f"with {names} there are {readable(max(0, level.free))} of memory left "
                f"({level.bound.name}), and learning takes {readable(LEARNING_BYTES)}: make "
                f"{'it' if len(held) == 1 else 'them together'} at most "
                f"{100 * (total - missing) // total} % as large, or give the run more memory"
            )
        if level.free <= 0:
            raise MemoryBudgetError(
                f"{level.bound.name}: the run's processes hold {readable(level.bound.used)} before "
                f"its first step, and training takes some {readable(TRAINING_BYTES)} more: set "
                f"{enough_for(level.bound.used)} or more"
            )

    def peaks(self, *, exact: bool = False) -> Peaks:
        """Return the most that was used so far; `exact` reads the tree, milliseconds a process."""
        if exact:
            self._monitor.refresh_tree()
        card = self._monitor.card
        return Peaks(self._monitor.tree_peak, None if card is None else card.peak)

    def close(self) -> None:
        """Stop tracing; may be called twice."""
        self._detector.close()
        self._limit.close()
        if self._snapshot is not None:
            self._snapshot.close()

    def _raise_found(self) -> None:
        error = self._find_error()
        if error is not None:
            raise error

    def _build_meters(self, saving: int) -> list[BoundsMeter | OwnMeter]:
        """Return the meter that ends the run, if one does, then what the kernel enforces."""
        limit, monitor = self._settings.limit_mb, self._monitor
        margin = saving if isinstance(limit, str) else None
        bounds = BoundsMeter(Bounds(), lambda: monitor.tree.swap, margin)
        return [OwnMeter(limit, monitor), bounds] if isinstance(limit, float | int) else [bounds]

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
