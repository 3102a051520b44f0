"""What this process and its children hold: cores, memory, threads, open files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import psutil


class Tree(NamedTuple):
    """The process tree: its memory with shared pages counted once, and its handles."""

    pss: int
    own: int  # of it, what is no mapped file: heaps, stacks and shared memory
    children: int
    threads: int  # of this process
    open_files: int  # of this process: files, sockets, pipes


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_rss(process: psutil.Process) -> int:
    """Return the resident bytes of one process; microseconds."""
    return int(process.memory_info().rss)


def read_tree(process: psutil.Process) -> Tree:
    """Measure the tree; milliseconds per process, and a child that vanishes is no error."""
    alive = [s for s in map(read_share, process.children(recursive=True)) if s is not None]
    shares = [read_share(process) or Share(0, 0), *alive]
    pss, own = (sum(column) for column in zip(*shares, strict=True))
    return Tree(pss, own, len(alive), process.num_threads(), open_files(process))


def open_files(process: psutil.Process) -> int:
    """Count open file descriptors (handles on Windows)."""
    if sys.platform == "win32":
        return int(process.num_handles())
    return int(process.num_fds())


class Share(NamedTuple):
    """What one process takes of the machine: a page shared by k processes counts 1/k in each."""

    pss: int
    own: int


def read_share(process: psutil.Process) -> Share | None:
    """Return the share of one process; None if it has vanished meanwhile."""
    try:
        if sys.platform == "linux":
            sizes = _rollup(process.pid)
            if sizes:
                return Share(sizes["Pss"], sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0))
        # Elsewhere what is the process's own is the nearest there is to both.
        uss = int(process.memory_full_info().uss)
        return Share(uss, uss)
    except psutil.AccessDenied:
        rss = read_rss(process)
        return Share(rss, rss)
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


def read_own(process: psutil.Process) -> int:
    """Return the resident bytes of one process that are no mapped file; microseconds."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared) if sys.platform == "linux" else int(memory.rss)
