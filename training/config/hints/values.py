"""Numbers, ranges and lists that are typed as elsewhere: how they are written."""

from __future__ import annotations

import re

MOST_SEEDS = 10  # written out

# A number of thousands or millions.
COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmM])", re.ASCII)

EXPONENTS = {"k": 3, "m": 6}

GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+", re.ASCII)

RANGE = re.compile(r"(\d+)(?:\.\.|-)(\d+)", re.ASCII)


def number_hint(key: str, value: object) -> str:
    """Return how a number, or a range for a sweep, is written; "": unknown."""
    count, span = COUNT.fullmatch(str(value)), RANGE.fullmatch(str(value))
    if count:
        written = f"{count[1]}e{EXPONENTS[count[2].lower()]}"
        return f": write {float(written):_.0f} or {written}" if float(written) % 1 == 0 else ""
    if span and int(span[1]) < int(span[2]):
        return f": one run for each is -m '{key}=range({span[1]},{int(span[2]) + 1})'"
    return ""


def grouped_hint(value: str) -> str:
    """Return how one number is written whose thousands have commas; "": it is none."""
    return f"; one number is {value.replace(',', '_')}" if GROUPED.fullmatch(value) else ""


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
