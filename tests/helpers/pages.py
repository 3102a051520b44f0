"""Memory that is new to the process, and what a process maps before it asks for any."""

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def fresh_pages(size):
    """Take pages from the system: malloc may hand out what the process has already."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    pages.fill(1)
    return pages


def mapped_by(module):
    """Return the bytes of address space that a process has with such a module of ours, or torch."""
    code = f"import {module}, psutil; print(psutil.Process().memory_info().vms)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)
