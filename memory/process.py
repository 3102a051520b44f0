"""What this process and its children hold (memory, threads, open files), and bytes in words."""

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

# Decimal units, as on the label of a memory module or a disk.
MB = 1_000_000

# What reading fails with: a process that ends meanwhile, one of somebody else, no /proc, and no
# file descriptor left to read it with.
UNREADABLE = (psutil.Error, OSError)


class ProcessMemory(NamedTuple):
    """What one process takes of the machine.

    A page that k processes share counts 1/k in `pss` and `own`. In `heap` it counts in full: a
    worker that writes to a page it shares with its parent gets a copy, which moves the shares of
    both, but is no growth of either.
    """

    pss: int
    own: int  # of it, what is no mapped file: heaps, stacks and shared memory
    heap: int  # heaps and stacks in full, and the share of shared memory


class Worker(NamedTuple):
    """A process below this one, by the name that says what it is for."""

    pid: int
    name: str
    heap: int


class Tree(NamedTuple):
    """The process tree: its memory with shared pages counted once, and its handles."""

    pss: int
    heap: int  # of this process
    children: int
    threads: int  # of this process
    open_files: int  # of this process: files, sockets, pipes
    workers: tuple[Worker, ...] = ()


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_rss(process: psutil.Process) -> int:
    """Return the resident bytes of one process; microseconds."""
    return int(process.memory_info().rss)


def read_heap(process: psutil.Process) -> int:
    """Return the resident bytes of one process that are no mapped file; microseconds."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared) if sys.platform == "linux" else int(memory.rss)


def read_heaps(workers: Iterable[Worker]) -> dict[int, int]:
    """Return the same of workers, by their numbers; of those that are still there."""
    heaps = {}
    for worker in workers:
        with suppress(psutil.Error):
            heaps[worker.pid] = read_heap(psutil.Process(worker.pid))
    return heaps


def read_peak() -> int:
    """Return the most bytes that were ever resident in this process."""
    # What getrusage says began with the program that started this one: its size counts there.
    with suppress(OSError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def read_tree(process: psutil.Process) -> Tree:
    """Measure the tree; milliseconds per process, and a child that vanishes is no error."""
    names = {child.pid: child.name for child in multiprocessing.active_children()}
    own = read_process_memory(process) or ProcessMemory(0, 0, 0)
    pss, workers = own.pss, []
    for child in process.children(recursive=True):
        share = read_process_memory(child)
        if share is not None:
            pss += share.pss
            workers.append(Worker(child.pid, names.get(child.pid, "a child"), share.heap))
    threads, files = process.num_threads(), process.num_fds()
    return Tree(pss, own.heap, len(workers), threads, files, tuple(workers))


def read_process_memory(process: psutil.Process) -> ProcessMemory | None:
    """Return the share of one process; None if it has vanished meanwhile."""
    try:
        if sys.platform == "linux":
            sizes = _rollup(process.pid)
            if sizes:
                shared_memory = sizes.get("Pss_Shmem", 0)
                own = sizes.get("Pss_Anon", 0) + shared_memory
                return ProcessMemory(sizes["Pss"], own, sizes.get("Anonymous", own) + shared_memory)
        # Elsewhere what is the process's own is the nearest there is to all of them.
        uss = int(process.memory_full_info().uss)
        return ProcessMemory(uss, uss, uss)
    except psutil.AccessDenied:
        rss = read_rss(process)
        return ProcessMemory(rss, rss, rss)
    except psutil.NoSuchProcess:  # a zombie among them
        return None


def _rollup(pid: int) -> dict[str, int]:
    """Return the kernel's sums over all mappings of a process; empty where it has none."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
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
