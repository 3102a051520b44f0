"""The registered algorithms as tests see them: each brings overrides that make its runs small.

They stand in `tests/agents/<name>/small.py`, as `SMALL`. Tests that hold for every algorithm take
the names from the registry and the overrides from here.
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

    # An update within 8 timesteps of one environment, each in a few milliseconds.
    quick: Overrides
    # Updates throughout a run of 300 steps with two environments, more than five of them.
    short: Overrides
    # Switches with a state of their own (statistics, priorities), for runs that are continued.
    stateful: Overrides = ()
    # Buffers small enough for a test, where a preset is otherwise built as it stands.
    small_buffers: Overrides = ()
    # A run whose buffers hold 150 MB or more of 4 x 16 KB observations, with its `total_steps`.
    large: Overrides
    # {switch: {value: overrides}} that all go together; the first value of each is the default.
    # Those for every algorithm are in tests/test_every_pair.py: a value named as there replaces it.
    switches: Mapping[str, Mapping[str, Overrides]] = field(default_factory=dict)
    # Pairs of (switch, value) that the program refuses, of these and of those for every algorithm.
    refused: tuple[tuple[tuple[str, str], tuple[str, str]], ...] = ()


def on_off(*keys: str) -> dict[str, dict[str, Overrides]]:
    """Return a switch for each boolean key of the agent."""
    return {key: {"off": (), "on": (f"agent.{key}=true",)} for key in keys}


@cache
def small(name: str) -> Small:
    """Return the small overrides that an algorithm brings."""
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
    """Return `agent=<name>`, and that nothing is compiled."""
    return (f"agent={name}", *known(name, "agent.compile=false"))
