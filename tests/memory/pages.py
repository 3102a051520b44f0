"""Memory that is new to the process."""

import mmap

import numpy as np


def fresh_pages(size):
    """Take pages from the system: malloc may hand out what the process has already."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    pages.fill(1)
    return pages
