"""Memory readings of the running process tree; expensive ones are taken less often."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import psutil
import torch

from steadyrl.core.errors import describe
from steadyrl.memory.gpu.nvml import CardUsage, read_usage
from steadyrl.memory.gpu.peak import open_peak
from steadyrl.memory.malloc import trim
from steadyrl.memory.process import (
    MB,
    UNREADABLE,
    Tree,
    Worker,
    read_heap,
    read_heaps,
    read_rss,
    read_tree,
)
from steadyrl.memory.settings import MonitorSettings
from steadyrl.memory.tensors import LiveTensors, live_tensors

log = logging.getLogger("steadyrl")
T = TypeVar("T")

# A reading is repeated after at least this many times its own CPU time.
_PATIENCE = 400


class ThrottledReading(Generic[T]):
    """The newest result of an expensive function.

    It is called again at the earliest `every_seconds` after the last call, and never so often that
    it takes more than 1/400 of the time; `every_seconds=0`: at every poll. Its cost is measured in
    CPU time, because on a busy machine wall time is mostly waiting.
    """

    def __init__(
        self,
        read: Callable[[], T],
        every_seconds: float,
        clock: Callable[[], float],
        effort: Callable[[], float] = time.thread_time,
    ) -> None:
        self._read, self._every = read, every_seconds
        self._clock, self._effort = clock, effort
        self.value = self.refresh()

    def refresh(self) -> T:
        """Call the function now."""
        start = self._effort()
        self.value = self._read()
        self.cost = self._effort() - start
        wait = max(self._every, _PATIENCE * self.cost) if self._every else 0.0
        self._due = self._clock() + wait
        return self.value

    def poll(self) -> bool:
        """Call the function if it is due; return whether the value is new."""
        if self._clock() < self._due:
            return False
        self.refresh()
        return True


class Cuda(NamedTuple):
    """The CUDA allocator's bytes, and how often it had to free its cache for an allocation."""

    allocated: int
    reserved: int
    peak: int  # allocated at most since the last reading
    retries: int  # since the start
    usage: CardUsage  # by all processes


class Reading(NamedTuple):
    """One sample; `tree` and `tensors` may be older, `tree_is_new` tells for the tree."""

    rss: int
    kept: int  # estimate of the tree's `kept` now
    heap: int  # of this process now; unaffected by other processes
    tree: Tree
    tree_is_new: bool
    workers: tuple[Worker, ...]  # newer than the tree, if read since
    tensors: LiveTensors
    cuda: Cuda | None


class Monitor:
    """Reads RSS at every sample, the process tree and the live tensors less often.

    A failed reading must not end the run: the last value is kept.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        device: torch.device,
        buffers: Mapping[str, int],
        clock: Callable[[], float] = time.perf_counter,
        *,
        own_process: bool = True,
    ) -> None:
        self._own_process = own_process
        self._cuda = device if device.type == "cuda" else None
        self._buffers = dict(buffers)
        self._settings, self._clock = settings, clock
        self._peak = None if self._cuda is None else open_peak(self._cuda)
        self._usage: ThrottledReading[CardUsage] | None = None
        self._rss = self._kept = 0
        self._silent = False
        self.tree_peak = 0  # bytes, pages in swap included; as far as it was read
        self.cuda_peak: int | None = None

    def rss(self) -> int:
        """Return the resident bytes of this process; about 15 µs."""
        with self._may_be_unreadable():
            self._rss = read_rss(self._process)
        return self._rss

    def kept(self) -> int:
        """Estimate the tree's `kept`: the last reading plus the change of every heap since.

        Takes 30 µs, and 15 µs per worker.
        """
        with self._may_be_unreadable():
            self._kept = self._estimate(read_heap(self._process))
        return self._kept

    def sample(self) -> Reading | None:
        """Return a sample, reading what is due; None if it cannot be read."""
        with self._may_be_unreadable():
            if tree_is_new := self._tree.poll():
                self._workers.refresh()
            workers_are_new = not tree_is_new and self._workers.poll()
            self.tensors.poll()
            rss, heap = read_rss(self._process), read_heap(self._process)
            self._rss = rss
            tree, kept = self._tree.value, self._estimate(heap)
            self.tree_peak = max(self.tree_peak, tree.pss + tree.swap + kept - tree.kept)
            return Reading(
                rss,
                kept,
                tree.heap + heap - self._heap_then,
                tree,
                tree_is_new,
                self._workers.value if workers_are_new else (),
                self.tensors.value,
                self._read_cuda(),
            )
        return None

    def refresh_tree(self) -> int:
        """Measure the tree now and return its `kept`."""
        with self._may_be_unreadable():
            self._kept = self._tree.refresh().kept
        return self._kept

    @property
    def tree(self) -> Tree:
        """The last reading of the process tree; empty if there is none."""
        return self._tree.value if "_tree" in self.__dict__ else Tree(0, 0, 0, 0, 0, 0, 0)

    def cuda_allocated(self) -> int | None:
        """Return the bytes that torch holds on the card; None without one."""
        return None if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def scalars(self, reading: Reading) -> dict[str, float]:
        """Return the reading as TensorBoard tags and values."""
        tree, tensors, cuda = reading.tree, reading.tensors, reading.cuda
        scalars = {
            "memory/rss_mb": reading.rss / MB,
            "memory/tree_pss_mb": tree.pss / MB,
            "memory/swap_mb": tree.swap / MB,
            "memory/children": float(tree.children),
            "memory/threads": float(tree.threads),
            "memory/open_files": float(tree.open_files),
            "memory/live_tensors": float(tensors.number),
            "memory/live_tensors_mb": tensors.nbytes / MB,
        }
        if cuda is not None:
            scalars["memory/cuda_allocated_mb"] = cuda.allocated / MB
            scalars["memory/cuda_reserved_mb"] = cuda.reserved / MB
            scalars["memory/cuda_peak_mb"] = cuda.peak / MB
            scalars["memory/cuda_alloc_retries"] = float(cuda.retries)
            if cuda.usage.used is not None:
                scalars["memory/cuda_used_mb"] = cuda.usage.used / MB
            if cuda.usage.utilization is not None:
                scalars["memory/cuda_utilization_percent"] = cuda.usage.utilization
        return scalars | {f"memory/{name}_mb": n / MB for name, n in self._buffers.items()}

    # Created at first use: each of them reads at once, and may fail.

    @cached_property
    def _process(self) -> psutil.Process:
        return psutil.Process()

    @cached_property
    def _tree(self) -> ThrottledReading[Tree]:
        return ThrottledReading(self._read_tree, self._settings.tree_every_seconds, self._clock)

    @cached_property
    def _workers(self) -> ThrottledReading[tuple[Worker, ...]]:
        return ThrottledReading(
            self._look_at_workers, self._settings.tree_every_seconds, self._clock
        )

    @cached_property
    def tensors(self) -> ThrottledReading[LiveTensors]:
        """Count the live tensors."""
        return ThrottledReading(
            self._count_tensors, self._settings.tensors_every_seconds, self._clock
        )

    @contextmanager
    def _may_be_unreadable(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            if not self._silent:
                self._silent = True
                log.warning(
                    "cannot read memory usage (%s): training continues; memory/ metrics, leak "
                    "detection and memory.limit_mb pause until it can be read again",
                    describe(error),
                )

    def _estimate(self, heap: int) -> int:
        tree, then = self._tree.value, self._heaps_then
        now = read_heaps(tree.workers)
        moved = sum(now[pid] - then[pid] for pid in now.keys() & then.keys())
        return tree.kept + heap - self._heap_then + moved

    def _read_tree(self) -> Tree:
        tree = read_tree(self._process)
        self.tree_peak = max(self.tree_peak, tree.pss + tree.swap)
        self._heap_then = read_heap(self._process)
        self._heaps_then = read_heaps(tree.workers)
        return tree

    def _look_at_workers(self) -> tuple[Worker, ...]:
        """Return the workers' memory: that of the last tree reading plus the change since.

        Microseconds; reading the tree takes milliseconds, or tens of them if a worker leaks.
        """
        then, now = self._heaps_then, read_heaps(self._tree.value.workers)
        moved = {pid: now[pid] - then[pid] for pid in now.keys() & then.keys()}
        return tuple(
            worker._replace(heap=worker.heap + moved[worker.pid])
            for worker in self._tree.value.workers
            if worker.pid in moved
        )

    def _read_cuda(self) -> Cuda | None:
        if self._cuda is None or self._peak is None:
            return None
        stats, peak = torch.cuda.memory_stats(self._cuda), self._peak.pop()
        self.cuda_peak = max(self.cuda_peak or 0, peak)
        return Cuda(
            stats["allocated_bytes.all.current"],
            stats["reserved_bytes.all.current"],
            peak,
            stats["num_alloc_retries"],
            self._read_usage(self._cuda),
        )

    def _count_tensors(self) -> LiveTensors:
        """Count live tensors, then return the memory of the temporary list of all objects."""
        found = live_tensors()
        if self._own_process:
            trim()
        return found

    def _read_usage(self, card: torch.device) -> CardUsage:
        if self._usage is None:
            seconds = self._settings.every_seconds
            self._usage = ThrottledReading(lambda: read_usage(card), seconds, self._clock)
        else:
            self._usage.poll()
        return self._usage.value
