"""Bytes for people; decimal units, as on the label of a memory module or a disk."""

from __future__ import annotations

MB = 1_000_000


def readable(nbytes: float) -> str:
    """Return 7_056_000_000 as "7.06 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(nbytes) >= size:
            return f"{_three_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
