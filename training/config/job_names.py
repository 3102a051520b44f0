"""Names of the directories of a sweep's jobs, from their overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from steadyrl.training.config.overrides import key_of

LONGEST = 180  # bytes; most file systems take 255 for a name

SORTED_LAST = "seed"  # so that runs that differ in their seed only are listed side by side


def job_name(job: int, overrides: Sequence[str], typed: Sequence[str]) -> str:
    """Return a directory name such as agent-ppo__seed-1__job-3 for a job with these overrides.

    `typed`: the sweep's command line; keys it gives one value are the same for all jobs and left
    out. A sweeper may try the same values again, hence the job's number.
    """
    same = fixed_keys(typed)
    differing = [text for text in overrides if key_of(text) not in same]
    ordered = sorted(differing, key=lambda text: key_of(text) == SORTED_LAST)
    named = [_as_file_name(text) for text in ordered]
    return "__".join([*_short(named), f"job-{job}"])


def fixed_keys(typed: Iterable[str]) -> set[str]:
    """Return the keys and groups to which the overrides give a single value."""
    parsed = OverridesParser.create().parse_overrides(list(typed))
    return {
        key_of(override.input_line or "") for override in parsed if not override.is_sweep_override()
    }


def _short(named: list[str]) -> list[str]:
    """Drop overrides from the end until the name is short enough."""
    while sum(len(each) + 2 for each in named) > LONGEST:
        named = named[:-1]
    return named


def _as_file_name(override: str) -> str:
    """Return an override as part of a file name that shells and `resume=…` need not quote."""
    key, _, value = override.lstrip("+~").partition("=")
    bare = re.sub(r"[\[\]{}()'\"\s\\+]", "", value)
    return re.sub(r"[^\w.-]", "-", f"{key.replace('/', '.')}-{bare}", flags=re.ASCII)
