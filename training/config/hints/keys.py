"""Keys that do not exist: the nearest that do, of this agent, another agent or another trainer."""

from __future__ import annotations

import dataclasses
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from steadyrl.agents.registry import ALGORITHMS, find_entry_point, settings_type
from steadyrl.core.command.typed import command_of
from steadyrl.training.config.hints.chosen_agent import agent_of
from steadyrl.training.config.hints.other_trainers import (
    MAIN_KEYS,
    other_agents_hint,
    our_key,
    switch_override,
    unit_hint,
    why_absent,
)
from steadyrl.training.config.settings import RunSettings

MOST_LISTED = 9  # keys of a block, where none is like the one that was typed

MOST_LINES = 9  # on more unknown keys without a hint, below the error's line

NO_HINT = "--cfg job prints all keys"


def unknown_key(key: str, agent: str, value: str = "") -> str:
    """Return what is wrong with a key that does not exist for `agent`; `value`: its value."""
    key = key.replace("/", ".")  # a group inside of a group
    names = [*ALGORITHMS, *([agent] if agent not in ALGORITHMS and find_entry_point(agent) else [])]
    ours = keys_of("")
    keys = {name: [*ours, *full_keys(settings_type(name), "agent.")] for name in names}
    owners = [name for name in keys if key in keys[name]]
    if owners and agent not in owners:
        return f"is a key of {' and '.join(owners)}, and the agent is {agent}"
    why = why_absent(key, value)
    if why:
        return f"no such key; {why}"
    main = MAIN_KEYS.get(key) or MAIN_KEYS.get(f"agent.{key}")
    if main:
        return f"no such key; it is {main}"
    own = keys.get(agent, ours)
    theirs = our_key(key, own)
    block, _, last = key.rpartition(".")
    wanted = theirs or last
    inside = [each.rpartition(".")[2] for each in own if each.rpartition(".")[0] == block]
    if inside and "." in block and not theirs:
        keys = {agent: own}  # keys of other blocks, of other agents, are no likelier
    has_block = {name: any(k.startswith(f"{block}.") for k in keys[name]) for name in keys}
    for name in sorted(keys, key=lambda name: (not has_block[name], name != agent)):
        same = [known for known in keys[name] if wanted in (known, known.rpartition(".")[2])]
        if theirs and not same:
            continue  # the key belongs to another agent: suggest no similar key of this one
        close = same or _alike(key, keys[name])
        if close and close != [key]:
            whose = "" if close[0] in own else f", a key of {name}"
            others = other_agents_hint(key, own)
            return f"no such key; did you mean {close[0]}{whose}?{unit_hint(key, close[0])}{others}"
    if block in own and len(inside) <= MOST_LISTED:
        return f"no such key; {block} has {', '.join(inside)}"
    return f"no such key; {NO_HINT}"


def _alike(key: str, known: list[str]) -> list[str]:
    """Return the known key most similar to one, by names without a group that is the same."""
    group = key.rpartition(".")[0] + "."
    inside = {each.removeprefix(group): each for each in known if each.startswith(group)}
    name = key.removeprefix(group) if inside else key
    found = get_close_matches(name, inside, n=1, cutoff=0.8)
    if found:
        return [inside[found[0]]]
    names = {each: each for each in known if not each.startswith(group)} | inside
    return [names[each] for each in get_close_matches(name, names, n=1)]


def explain_unknown(typed: str, key: str, agent: str) -> str:
    """Return the whole line for an override of a key that does not exist for `agent`."""
    value = typed.partition("=")[2]
    instead = switch_override(key, value)
    reason = f"no such key; {write_hint(instead)}" if instead else unknown_key(key, agent, value)
    return f"{typed}: {reason}"


def also_unknown(reason: str, overrides: list[str], presets: Path | None = None) -> list[str]:
    """Return a line for each other override of an unknown key, if `reason` is about one too."""
    if ": no such key" not in reason:
        return []
    typed = dict(text.split("=", 1) for text in overrides if re.match(r"[\w.]+=", text))
    agent = agent_of(overrides, presets)
    if agent not in ALGORITHMS:
        return []
    known = {"agent", "env", "experiment", "memory", *full_keys(RunSettings, "")}
    known |= {*full_keys(settings_type(agent), "agent.")}
    lines = [
        explain_unknown(f"{key}={value}", key, agent)
        for key, value in typed.items()
        if key not in known and not key.startswith(("env.kwargs.", "hydra."))
    ]
    return first_lines([line for line in lines if line != reason])


def first_lines(lines: list[str]) -> list[str]:
    """Return all lines with a hint, MOST_LINES of the others, and how many there are more."""
    left_out = [line for line in lines if line.endswith(NO_HINT)][MOST_LINES:]
    if not left_out:
        return lines
    return [*(line for line in lines if line not in left_out), f"… and {len(left_out)} more"]


def write_hint(instead: str) -> str:
    """Return a hint to write an override, or to start a program, instead."""
    films = instead.startswith(command_of("evaluate"))
    return f"film a run: {instead}" if films else f"write {instead}"


def key_for(name: str, agent: str) -> str | None:
    """Return the full key for a name without its groups, ours or of another trainer, if any."""
    keys = keys_of(agent)
    wanted = our_key(name, keys) or name
    return next((key for key in keys if wanted in (key, key.rpartition(".")[2])), None)


def keys_of(agent: str) -> list[str]:
    """Return the full keys of a run with this agent, of which an unknown one has none."""
    keys = ["agent", "experiment", *full_keys(RunSettings, "")]
    if agent in ALGORITHMS:
        keys += full_keys(settings_type(agent), "agent.")
    return keys


def is_switch(key: str, agent: str) -> bool:
    """Return whether a key is true or false."""
    classes: list[tuple[Any, str]] = [(RunSettings, "")]
    if agent in ALGORITHMS:
        classes.append((settings_type(agent), "agent."))
    return any(key in full_keys(cls, path, only=bool) for cls, path in classes)


@cache  # a refusal asks several times, and type hints take milliseconds
def full_keys(cls: Any, path: str, only: Any = None) -> tuple[str, ...]:
    """Return the full keys of a settings class and those inside of it; `only` those of a type."""
    found: list[str] = []
    for name, hint in get_type_hints(cls).items():
        if only is None or hint == only:
            found.append(path + name)
        if dataclasses.is_dataclass(hint):
            inside: Any = hint
            found += full_keys(inside, path + name + ".", only)
    return tuple(found)
