"""Registered algorithms for tests, with overrides that make their runs small.

The overrides are `SMALL` in `tests/agents/<name>/small.py`. Tests of all algorithms take names from
the registry and overrides from here.
"""

import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

from steadyrl.agents.registry import ALGORITHMS, settings_type

NAMES = tuple(ALGORITHMS)
Overrides = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Small:
    """Overrides of one algorithm, without `agent=<name>` and `agent.compile`."""

    # At least one update within 8 steps of one environment; a few milliseconds per step.
    quick: Overrides
    # More than five updates, spread over a run of 300 steps with two environments.
    short: Overrides
    # Options with extra state (statistics, priorities), for runs that are resumed.
    stateful: Overrides = ()
    # Buffers small enough for a test that otherwise uses a preset unchanged.
    small_buffers: Overrides = ()
    # A run with 150 MB or more of 16 KB observations in its buffers, `total_steps` included.
    large: Overrides
    # {option: {value: overrides}} that can all be combined; cases without the option have its first
    # value. Options of every algorithm are in tests/test_every_pair.py; the same value here
    # replaces theirs.
    switches: Mapping[str, Mapping[str, Overrides]] = field(default_factory=dict)
    # Numbers with a schedule (X or X_start, X_end, anneal_X, X_warmup) besides the learning rate.
    scheduled: tuple[str, ...] = ()
    # Pairs of (option, value) that the configuration check rejects.
    refused: tuple[tuple[tuple[str, str], tuple[str, str]], ...] = ()


def on_off(*keys: str) -> dict[str, dict[str, Overrides]]:
    """Return an on/off option for each boolean key of the agent."""
    return {key: {"off": (f"agent.{key}=false",), "on": (f"agent.{key}=true",)} for key in keys}


@cache
def small(name: str) -> Small:
    """Return an algorithm's small overrides."""
    place = Path(__file__).parents[1] / "agents" / name / "small.py"
    assert place.is_file(), f"{name} is registered, and {place} is missing"
    found = runpy.run_path(str(place))["SMALL"]
    assert isinstance(found, Small)
    return found


@cache
def keys(name: str) -> frozenset[str]:
    """Return the full keys of an algorithm's settings: agent.gamma, agent.replay.capacity."""
    return frozenset(_keys(settings_type(name), "agent."))


def _keys(cls, path):
    for name, hint in get_type_hints(cls).items():
        yield path + name
        if is_dataclass(hint):
            yield from _keys(hint, f"{path}{name}.")


def known(name: str, *overrides: str) -> Overrides:
    """Return the overrides whose keys this algorithm has."""
    return tuple(text for text in overrides if text.partition("=")[0] in keys(name))


def eager(name: str) -> Overrides:
    """Return overrides that select the algorithm without compilation."""
    return (f"agent={name}", *known(name, "agent.compile=false"))
