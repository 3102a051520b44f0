"""Fresh memory pages, and the address space a process maps on import."""

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def fresh_pages(size):
    """Return new pages from the system; malloc might reuse old ones."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    pages.fill(1)
    return pages


def mapped_by(module):
    """Return the virtual memory size of a process that imports `module`."""
    code = f"import {module}, psutil; print(psutil.Process().memory_info().vms)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)
