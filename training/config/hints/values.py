"""Lists that are not typed as lists: how they are written."""

from __future__ import annotations

import re

MOST_SEEDS = 10  # written out

RANGE = re.compile(r"(\d+)(?:\.\.|-)(\d+)", re.ASCII)


def list_hint(key: str, value: object) -> str:
    """Return how a value is written as a list; "": unknown."""
    found = RANGE.fullmatch(str(value))
    if key == "seeds" and found and int(found[1]) < int(found[2]):
        return f": write {_seeds(int(found[1]), int(found[2]))}"
    if key == "seeds" and type(value) is int and value > 1:
        return f": write {_seeds(0, value - 1)} for {value:,} seeds, seed={value} for one"
    if isinstance(value, str | int | float) and "," not in str(value):
        return f": write {key}=[{value}]"
    return ""


def _seeds(first: int, last: int) -> str:
    """Return the override for these seeds, many in short."""
    few = last - first < MOST_SEEDS
    listed = map(str, range(first, last + 1) if few else (first, first + 1, "…", last))
    return f"'seeds=[{','.join(listed)}]'"
