"""Memory readings of the running process tree; expensive ones are taken less often."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import psutil
import torch

from steadyrl.core.errors import describe
from steadyrl.memory.gpu.usage import CardMonitor, CardReading
from steadyrl.memory.host.malloc import trim
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
from steadyrl.memory.throttled_reading import ThrottledReading

log = logging.getLogger("steadyrl")


class Reading(NamedTuple):
    """One sample; `tree` and `tensors` may be older, `tree_is_new`: whether `tree` is of now."""

    rss: int
    kept: int  # estimate of the tree's `kept` now
    heap: int  # of this process now; unaffected by other processes
    tree: Tree
    tree_is_new: bool
    workers: tuple[Worker, ...]  # newer than the tree, if read since
    tensors: LiveTensors
    cuda: CardReading | None


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
        every = settings.every_seconds
        self.card = CardMonitor(device, every, clock) if device.type == "cuda" else None
        self._buffers = dict(buffers)
        self._settings, self._clock = settings, clock
        self._rss = self._kept = 0
        self._silent = False
        self.tree_peak = 0  # bytes, pages in swap included; as far as it was read

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
                None if self.card is None else self.card.read(),
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

    def scalars(self, reading: Reading) -> dict[str, float]:
        """Return the reading as TensorBoard tags and values."""
        tree, tensors = reading.tree, reading.tensors
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
        if reading.cuda is not None:
            scalars |= reading.cuda.scalars()
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
        return ThrottledReading(self._read_workers, self._settings.tree_every_seconds, self._clock)

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
        tree = self._tree.value
        return tree.kept + heap - self._heap_then + sum(self._worker_growth().values())

    def _worker_growth(self) -> dict[int, int]:
        """Return the change of each living worker's heap since the last tree reading, by pid."""
        now, then = read_heaps(self._tree.value.workers), self._heaps_then
        return {pid: now[pid] - then[pid] for pid in now.keys() & then.keys()}

    def _read_tree(self) -> Tree:
        tree = read_tree(self._process)
        self.tree_peak = max(self.tree_peak, tree.pss + tree.swap)
        self._heap_then = read_heap(self._process)
        self._heaps_then = read_heaps(tree.workers)
        return tree

    def _read_workers(self) -> tuple[Worker, ...]:
        """Return the workers' memory: that of the last tree reading plus the change since.

        Microseconds; reading the tree takes milliseconds, or tens of them if a worker leaks.
        """
        growth = self._worker_growth()
        return tuple(
            worker._replace(heap=worker.heap + growth[worker.pid])
            for worker in self._tree.value.workers
            if worker.pid in growth
        )

    def _count_tensors(self) -> LiveTensors:
        """Count live tensors, then return the memory of the temporary list of all objects."""
        found = live_tensors()
        if self._own_process:
            trim()
        return found
