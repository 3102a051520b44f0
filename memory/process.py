"""Memory, threads and open files of this process and its children."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

# Decimal units.
MB = 1_000_000

# Errors while reading: the process ended, belongs to another user, no /proc, no file descriptors.
UNREADABLE = (psutil.Error, OSError)

PROC = Path("/proc")


class ProcessMemory(NamedTuple):
    """Memory of one process.

    A page shared by k processes counts 1/k in `pss` and `own`, but fully in `heap`: when a worker
    writes to a page shared with its parent it gets a copy, which changes the PSS of both although
    neither has grown.
    """

    pss: int
    own: int  # PSS without mapped files: heaps, stacks and shared memory
    heap: int  # heaps and stacks in full, in swap too; shared memory proportionally
    swap: int = 0  # pages in swap, which `pss` and `own` leave out

    @property
    def kept(self) -> int:
        """What the system cannot take back, with shared pages counted in part."""
        return self.own + self.swap


class Worker(NamedTuple):
    """A child process, by its multiprocessing name; `kept` is its part of the tree's."""

    pid: int
    name: str
    heap: int
    kept: int


class Tree(NamedTuple):
    """The process tree: its memory with shared pages counted once, and its handles."""

    pss: int
    kept: int  # what the system cannot take back: heaps, stacks, shared memory, pages in swap
    swap: int
    heap: int  # of this process
    children: int
    threads: int  # of this process
    open_files: int  # of this process: files, sockets, pipes
    workers: tuple[Worker, ...] = ()


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_rss(process: psutil.Process) -> int:
    """Return the resident set size of a process; takes microseconds."""
    return int(process.memory_info().rss)


def read_heap(process: psutil.Process) -> int:
    """Return a process's bytes without mapped files, resident or in swap; takes microseconds."""
    memory = process.memory_info()
    if sys.platform != "linux":
        return int(memory.rss)
    return int(memory.rss - memory.shared) + _read_swapped(process.pid)


def read_heaps(workers: Iterable[Worker]) -> dict[int, int]:
    """Return `read_heap` of workers by pid, without those that have ended."""
    heaps = {}
    for worker in workers:
        with suppress(psutil.Error, OSError):
            heaps[worker.pid] = _heap_of(worker.pid)
    return heaps


def _heap_of(pid: int) -> int:
    if sys.platform != "linux":
        return read_heap(psutil.Process(pid))
    # Without psutil.Process, which takes ten times as long to make.
    with open(PROC / str(pid) / "statm", "rb", buffering=0) as statm:
        _, resident, shared, *_ = statm.read(256).split()
    return (int(resident) - int(shared)) * resource.getpagesize() + _read_swapped(pid)


def _read_swapped(pid: int) -> int:
    """Return a process's bytes in swap: a page that is moved there is no memory freed."""
    with suppress(OSError), open(PROC / str(pid) / "status", "rb", buffering=0) as status:
        _, _, found = status.read(4096).partition(b"\nVmSwap:")
        if found:
            return int(found.split(None, 1)[0]) * 1024
    return 0


def read_peak() -> int:
    """Return the peak resident set size of this process."""
    # getrusage includes the peak of the program that exec'ed this one.
    with suppress(OSError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def read_tree(process: psutil.Process) -> Tree:
    """Measure the process tree; takes milliseconds per process. Children may vanish meanwhile."""
    names = {child.pid: child.name for child in multiprocessing.active_children()}
    own = read_process_memory(process) or ProcessMemory(0, 0, 0)
    parts, workers = [own], []
    for child in process.children(recursive=True):
        usage = read_process_memory(child)
        if usage is not None:
            parts.append(usage)
            name = names.get(child.pid, f"child {child.pid}")  # a program has no name
            workers.append(Worker(child.pid, name, usage.heap, usage.kept))
    threads, files = process.num_threads(), process.num_fds()
    pss, swap = sum(part.pss for part in parts), sum(part.swap for part in parts)
    kept = sum(part.kept for part in parts)
    return Tree(pss, kept, swap, own.heap, len(workers), threads, files, tuple(workers))


def read_process_memory(process: psutil.Process) -> ProcessMemory | None:
    """Return the memory of one process; None if it has ended."""
    try:
        if sys.platform == "linux":
            sizes = _rollup(process.pid)
            if sizes:
                shared_memory = sizes.get("Pss_Shmem", 0)
                # Linux before 5.4 does not say which part of its Pss is anonymous.
                own = sizes.get("Pss_Anon", sizes.get("Anonymous", 0)) + shared_memory
                heap = sizes.get("Anonymous", own) + shared_memory + sizes.get("Swap", 0)
                swap = sizes.get("SwapPss", sizes.get("Swap", 0))
                return ProcessMemory(sizes["Pss"], own, heap, swap)
        # Not Linux: USS is the closest value available.
        uss = int(process.memory_full_info().uss)
        return ProcessMemory(uss, uss, uss)
    except psutil.AccessDenied:
        rss = read_rss(process)
        return ProcessMemory(rss, rss, rss)
    except psutil.NoSuchProcess:  # including zombies
        return None


def _rollup(pid: int) -> dict[str, int]:
    """Return the sums of /proc/<pid>/smaps_rollup in bytes; empty if it cannot be read."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {key.rstrip(":"): int(kilobytes) * 1024 for key, kilobytes, *_ in fields}


def readable(nbytes: float) -> str:
    """Return 7_056_000_000 as "7.06 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        value = nbytes / size
        if abs(value) >= 1:
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"
