"""Numbers, ranges and lists that are typed as elsewhere: how they are written."""

from __future__ import annotations

import re

MOST_SEEDS = 10  # written out
MOST_JOBS = 10_000  # of a sweep that is proposed

# A number of thousands or millions.
COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmM])", re.ASCII)

EXPONENTS = {"k": 3, "m": 6}

GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+", re.ASCII)

RANGE = re.compile(r"(\d{1,18})(?:\.\.|-)(\d{1,18})", re.ASCII)


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


def list_hint(key: str, value: object, *, is_item: bool) -> str:
    """Return how a value is written as a list; "": unknown.

    `is_item`: whether the value has the type of the list's items.
    """
    span = RANGE.fullmatch(str(value))
    ends = (int(span[1]), int(span[2])) if span else (0, 0)
    if key in ("seeds", "env.image_range") and ends[0] < ends[1]:
        written = _seeds(*ends) if key == "seeds" else f"'{key}=[{ends[0]},{ends[1]}]'"
        return f": write {written}" if written else ""
    if key == "seeds":
        return _seeds_hint(_whole(value))
    if key == "env.image_range" or not is_item or "," in str(value):
        return ""
    return "" if isinstance(value, int | float) and value <= 0 else f": write {key}=[{value}]"


def _seeds_hint(count: int) -> str:
    """Return how so many seeds are written, and one of this number; "": not so many."""
    if count in (0, 1):
        return f": write seeds=[{count}]"
    written = _seeds(0, count - 1)
    return f": write {written} for {count:,} seeds, seed={count} for one" if written else ""


def _whole(value: object) -> int:
    """Return 3 for 3, 1000 for 1e3 or "1k", and -1 for what is no whole number."""
    count = COUNT.fullmatch(str(value))
    number = float(f"{count[1]}e{EXPONENTS[count[2].lower()]}") if count else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number % 1 != 0:
        return -1
    return int(number)


def _seeds(first: int, last: int) -> str:
    """Return the override for these seeds; "": for none or too many."""
    if last - first < MOST_SEEDS:
        listed = ",".join(map(str, range(first, last + 1)))
        return f"'seeds=[{listed}]'" if listed else ""
    return f"-m 'seed=range({first},{last + 1})'" if last - first < MOST_JOBS else ""
