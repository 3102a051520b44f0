"""Names for the runs of a sweep: what tells them apart, as one would type it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

LONGEST = 180  # bytes; most file systems take 255 for a name
LAST = "seed"  # runs that differ in nothing else stand side by side


def run_name(job: int, overrides: Sequence[str], typed: Sequence[str]) -> str:
    """Return agent-ppo__seed-1__job-3 for a job of a sweep that has these overrides.

    `typed` is what was typed for all jobs: what it gives one value is the same for all, and left
    out. Sweepers may come back to what they had, which only the number tells apart.
    """
    same = fixed_keys(typed)
    differing = [text for text in overrides if _key(text) not in same]
    named = [_plain(text) for text in sorted(differing, key=lambda text: _key(text) == LAST)]
    return "__".join([*_short(named), f"job-{job}"])


def fixed_keys(typed: Iterable[str]) -> set[str]:
    """Return the keys, or groups, to which overrides give one value."""
    parsed = OverridesParser.create().parse_overrides(list(typed))
    return {
        _key(override.input_line or "") for override in parsed if not override.is_sweep_override()
    }


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _short(named: list[str]) -> list[str]:
    """Leave out of a name what is too much, from its end."""
    while sum(len(each) + 2 for each in named) > LONGEST:
        named = named[:-1]
    return named


def _plain(override: str) -> str:
    """Return an override as a part of a name that shells, patterns and `resume=…` read as it is."""
    key, _, value = override.lstrip("+~").partition("=")
    bare = re.sub(r"[\[\]{}()'\"\s\\+]", "", value)
    return re.sub(r"[^\w.-]", "-", f"{key.replace('/', '.')}-{bare}", flags=re.ASCII)
