"""What this process and its children hold: memory, threads, open files."""

from __future__ import annotations

import sys
from typing import NamedTuple

import psutil


class Tree(NamedTuple):
    """The process tree: its memory with shared pages counted once, and its handles."""

    pss: int
    children: int
    threads: int  # of this process
    open_files: int  # of this process: files, sockets, pipes


def read_rss(process: psutil.Process) -> int:
    """Return the resident bytes of one process; microseconds."""
    return int(process.memory_info().rss)


def read_tree(process: psutil.Process) -> Tree:
    """Measure the tree; milliseconds per process, and a child that vanishes is no error."""
    children = process.children(recursive=True)
    alive = [pss for pss in map(_pss, children) if pss is not None]
    own = _pss(process) or 0
    return Tree(own + sum(alive), len(alive), process.num_threads(), open_files(process))


def open_files(process: psutil.Process) -> int:
    """Count open file descriptors (handles on Windows)."""
    if sys.platform == "win32":
        return int(process.num_handles())
    return int(process.num_fds())


def _pss(process: psutil.Process) -> int | None:
    """Return the proportional set size: a page shared by k processes counts 1/k in each.

    None if the process has vanished meanwhile.
    """
    try:
        memory = process.memory_full_info()
    except psutil.AccessDenied:
        return read_rss(process)
    except psutil.NoSuchProcess:  # a zombie among them
        return None
    # Elsewhere than on Linux, what is the process's own is the nearest to it.
    return int(memory.pss if sys.platform == "linux" else memory.uss)
