"""What the run holds right now, each number as often as it is cheap."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import psutil
import torch

from memory.process import Tree, read_own, read_rss, read_tree
from memory.rarely import Rarely
from memory.reclaim import trim
from memory.settings import MonitorSettings
from memory.tensors import LiveTensors, live_tensors
from memory.units import MB


class Cuda(NamedTuple):
    """Bytes of the accelerator's allocator: handed out, held, most handed out since last asked."""

    allocated: int
    reserved: int
    peak: int


class Reading(NamedTuple):
    """One sample; `tree` and `tensors` are the newest there are, `tree_is_new` if from now."""

    rss: int
    used: int  # estimate of Σ PSS now
    own: int  # estimate of its part that no other program's coming and going can change
    tree: Tree
    tree_is_new: bool
    tensors: LiveTensors
    cuda: Cuda | None


class Monitor:
    """Read RSS every time, the process tree and the live tensors rarely."""

    def __init__(
        self,
        settings: MonitorSettings,
        device: torch.device,
        buffers: Mapping[str, int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._process = psutil.Process()
        self._cuda = device if device.type == "cuda" else None
        self._buffers = dict(buffers)
        self._tree = Rarely(self._read_tree, settings.tree_every_seconds, clock)
        self._tensors = Rarely(_count_tensors, settings.tensors_every_seconds, clock)

    def rss(self) -> int:
        """Return the resident bytes of this process; about 15 µs."""
        return read_rss(self._process)

    def used(self) -> int:
        """Estimate the tree's memory cheaply: the last Σ PSS and what RSS has moved since."""
        return self._estimate(self.rss())

    def brief(self) -> dict[str, float]:
        """Return the one number that is logged every time."""
        return {"memory/rss_mb": self.rss() / MB}

    def sample(self) -> Reading:
        """Read what is due."""
        tree_is_new = self._tree.poll()
        self._tensors.poll()
        rss = self.rss()
        return Reading(
            rss,
            self._estimate(rss),
            self._tree.value.own + read_own(self._process) - self._own_then,
            self._tree.value,
            tree_is_new,
            self._tensors.value,
            self._read_cuda(),
        )

    def refresh_tree(self) -> int:
        """Measure the tree now and return its Σ PSS."""
        return self._tree.refresh().pss

    @property
    def tensors_cost(self) -> float:
        """Return the seconds that counting tensors took the last time."""
        return self._tensors.cost

    def scalars(self, reading: Reading) -> dict[str, float]:
        """Return the reading under the tags it is logged by."""
        tree, tensors, cuda = reading.tree, reading.tensors, reading.cuda
        scalars = {
            "memory/rss_mb": reading.rss / MB,
            "memory/tree_pss_mb": tree.pss / MB,
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
        return scalars | {f"memory/{name}_mb": n / MB for name, n in self._buffers.items()}

    def _estimate(self, rss: int) -> int:
        return self._tree.value.pss + rss - self._rss_then

    def _read_tree(self) -> Tree:
        self._rss_then, self._own_then = self.rss(), read_own(self._process)
        return read_tree(self._process)

    def _read_cuda(self) -> Cuda | None:
        if self._cuda is None:
            return None
        stats = torch.cuda.memory_stats(self._cuda)
        torch.cuda.reset_peak_memory_stats(self._cuda)
        return Cuda(
            stats["allocated_bytes.all.current"],
            stats["reserved_bytes.all.current"],
            stats["allocated_bytes.all.peak"],
        )


def _count_tensors() -> LiveTensors:
    """Count them, and hand back the megabytes that a list of all objects takes for a moment."""
    found = live_tensors()
    trim()
    return found
