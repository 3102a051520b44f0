"""Why a command does not compose to a configuration, in one line with the nearest that does."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from yaml import MarkedYAMLError  # type: ignore[import-untyped]

from steadyrl.agents.registry import ALGORITHMS, find_entry_point, settings_type
from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import describe, nearest, one_line
from steadyrl.training.config.names import (
    MAIN_KEYS,
    VARIANT_NOTES,
    VARIANTS,
    block_reason,
    other_agents_hint,
    our_key,
    switch_override,
    unit_hint,
    why_absent,
)
from steadyrl.training.config.overrides import escape_colons
from steadyrl.training.config.schema import UnknownKeyError, show
from steadyrl.training.config.settings import CONFIGS, RunSettings

# Keys whose values are lists, and which are typed without brackets.
LISTS = ("agent.hidden", "env.wrappers", "log.wandb.tags")

MOST_LISTED = 9  # keys of a block, where none is like the one that was typed

MOST_LINES = 9  # on more unknown keys, below the error's line

SEVERAL = {"seeds": "a list has brackets: 'seeds=[0,1,2]'"}

# Hydra's words for a preset that chooses a group which has a choice.
TWICE = re.compile(
    r"Multiple values for ([\w/]+)\. To override a value use 'override [\w/]+: ([^']+)'"
)

SIMPLE = re.compile(r"[A-Za-z_][\w.]*=[^\s='\"]+", re.ASCII)  # an override without spaces

PLAIN_VALUE = re.compile(r"[\w.,:/+\-\[\]{}()$*%@?|\\]*", re.ASCII)


def explain(
    error: Exception, overrides: list[str], *, multirun: bool, presets: Path | None = None
) -> str:
    """Say in one line what of the overrides Hydra or OmegaConf refused, and what to type.

    `presets`: the folder of `--config-dir`.
    """
    parsed = []
    for text in overrides:
        parser = OverridesParser.create()
        try:
            parsed.append(parser.parse_override(text))
        except Exception:  # Hydra's grammar raises its own, ANTLR's and Python's errors
            return _unreadable(text)
    for override in parsed:
        reason = _misused(override, multirun=multirun)
        if reason:
            return f"{override.input_line}: {reason}"
    return _about_a_file(error, parsed) or _about_a_key(error, parsed, presets)


def also_unknown(reason: str, overrides: list[str], presets: Path | None = None) -> list[str]:
    """Return a line for each other override of an unknown key, if `reason` is about one too."""
    if ": no such key" not in reason:
        return []
    typed = dict(text.split("=", 1) for text in overrides if re.match(r"[\w.]+=", text))
    agent = agent_of(overrides, presets)
    if agent not in ALGORITHMS:
        return []
    known = {"agent", "env", "experiment", "memory", *_fields(RunSettings, "")}
    known |= {*_fields(settings_type(agent), "agent.")}
    lines = [
        _unknown(f"{key}={value}", key, agent)
        for key, value in typed.items()
        if key not in known and not key.startswith(("env.kwargs.", "hydra."))
    ]
    return first_lines([line for line in lines if line != reason])


def first_lines(lines: list[str]) -> list[str]:
    """Return the first MOST_LINES lines, and how many there are more."""
    left = len(lines) - MOST_LINES
    return lines if left <= 0 else [*lines[:MOST_LINES], f"… and {left} more"]


def _about_a_file(error: Exception, parsed: list[Override]) -> str | None:
    """Explain a preset that is missing, or that is no YAML."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        for o in parsed:
            if o.key_or_group in ("env", "experiment"):
                reason = _no_such_preset(o, error.options or ())
                if reason:
                    return reason
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group.startswith("experiment/"):  # a relative group in a preset's defaults
            return _needs_override(parsed, group.rpartition("/")[2], name)
        if group and error.options:
            variant = name.lower().replace("-", "_")
            if group == "agent" and variant in VARIANTS:
                written = VARIANTS[variant] + VARIANT_NOTES.get(variant, "")
                return f"{group}={name}: no such {group}; write {written}"
            near = nearest(name.lower(), sorted(error.options))
            own = f"--config-dir DIR adds DIR/{group}/{name}.yaml; "
            hint = near if near.startswith("did") else own + near
            preset = next((o.input_line for o in parsed if o.key_or_group == "experiment"), None)
            asked = preset is None or any(o.key_or_group == group for o in parsed)
            by = "" if asked else f"{preset}: override /"
            return f"{by}{group}={name}: no such {group}; {hint}"
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        place = f"{error.problem_mark.name}, line {error.problem_mark.line + 1}"
        return f"{place}: cannot be read: {one_line(error.problem or str(error))}"
    return None


def _no_such_preset(override: Override, choices: Sequence[str]) -> str | None:
    """Say what to type for a preset that is none: an environment's id, or a path to a file."""
    group, name = override.key_or_group, str(override.value())
    if (
        override.is_sweep_override()
        or name in choices
        or (CONFIGS / group / f"{name}.yaml").exists()
    ):
        return None
    other = {"env": "experiment", "experiment": "env"}[group]
    if (CONFIGS / other / f"{name}.yaml").exists():
        return f"{group}={name}: is a preset of {other}: write {other}={name}"
    path = Path(name)
    if group == "env" and re.search(r"-v\d+$|[:/]", name):
        return f"env={name}: is an environment's id: write env.id={name}"
    if group == "experiment" and (path.suffix in (".yaml", ".yml") or "/" in name):
        folder = path.parent.parent if path.parent.name == group else "FOLDER"
        return (
            f"experiment={name}: takes a preset's name, not a path: put it at "
            f"{folder}/experiment/{path.stem}.yaml and write --config-dir {folder} "
            f"experiment={path.stem}"
        )
    return None


def _unreadable(text: str) -> str:
    text = text.removeprefix("++").replace("\\:", ":")  # as it was typed
    key, equals, value = text.partition("=")
    mapping = _as_mapping(value)
    if mapping != value and _is_readable(f"{key}={mapping}"):
        return f"{text}: a mapping has colons, and keys without quotes: '{key}={mapping}'"
    pair = re.fullmatch(r"([\w.]+): *(\S+)", text)
    if pair:
        return f"{text}: cannot be read; write {pair[1]}={pair[2]}"
    if value.startswith("[") and "]" not in value:
        return f"{text}: the shell ends it at the space; quote it, or leave spaces out: {key}=[…,…]"
    if " " in key:
        return f"{text}: {key!r} is no key: write {key.split()[-1].lstrip('/')}={value or '…'}"
    if not equals or not key:
        return f"{text}: cannot be read; overrides look like agent.gamma=0.99"
    words = text.split()
    if len(words) > 1 and all(SIMPLE.fullmatch(word) for word in words):
        return f"{text}: holds several overrides; write them apart: {', '.join(map(repr, words))}"
    if not PLAIN_VALUE.fullmatch(value) and not {"'", '"'} & set(value):
        return f"{text}: quote a value with such characters: '{key}=\"{value}\"'"
    return f"{text}: the value cannot be read; to mean it literally: '{key}=\"…\"'"


def _as_mapping(value: str) -> str:
    """Return JSON, or a call's keywords, as Hydra reads a mapping."""
    value = re.sub(r"""(["'])([A-Za-z_][\w.:]*)\1(?=\s*:)""", r"\2", value)
    return re.sub(r"([{,]\s*)(\w+)\s*=\s*", r"\1\2: ", value)


def _is_readable(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(escape_colons(text))
    except Exception:  # as in `explain`
        return False
    return True


def _misused(override: Override, *, multirun: bool) -> str | None:
    """Say what an override that can be read asks for in vain."""
    key = override.key_or_group
    if not key:
        return "names no key; overrides look like agent.gamma=0.99"
    if override.is_sweep_override() and not multirun:
        return _several(key, str(override.input_line))
    if key == "agent.name":
        return "an agent is chosen with all its keys: agent=…"
    if key == "hydra":
        return "only keys inside of hydra can be set"
    groups = {p.relative_to(CONFIGS).as_posix() for p in CONFIGS.rglob("*") if p.is_dir()}
    if key not in groups or override.is_delete():
        return None
    choices = sorted(path.stem for path in (CONFIGS / key).glob("*.yaml"))
    if override.is_add():
        return f"write it without +: {key}={override.value()}"
    if override.is_sweep_override():
        return None
    if isinstance(override.value(), list):
        return f"takes one name; -m {key}={choices[0]},… makes one run for each"
    if not isinstance(override.value(), str):
        return f"no such {key}; {nearest(str(override.value()), choices)}"
    return None


def _several(key: str, typed: str) -> str:
    listed = key if key in LISTS else our_key(key, ()) or f"agent.{key}"
    if listed in LISTS:
        return f"a list has brackets: '{listed}=[{typed.partition('=')[2]}]'"
    return SEVERAL.get(
        key, "several values are one run each: add -m (in Python: call train for each)"
    )


def _needs_override(parsed: list[Override], group: str, name: str) -> str:
    """Say what to write in the defaults of a preset that chooses a group anew."""
    preset = next((o.input_line for o in parsed if o.key_or_group == "experiment"), "a preset")
    return f"{preset}: its defaults choose {group} anew: write '- override /{group}: {name}'"


def _about_a_key(error: Exception, parsed: list[Override], presets: Path | None) -> str:
    """Explain what was refused while keys were set."""
    twice = TWICE.search(str(error))
    if twice:
        return _needs_override(parsed, twice[1], twice[2])
    found = re.search(r"Could not override '([^']+)'", str(error))
    if isinstance(error, UnknownKeyError):
        key = error.field
    elif found:
        key = found.group(1)
    else:
        key = str(getattr(error, "full_key", None) or "")
        reason = _first_line(error)
        return f"{key}: {reason}" if key and key not in reason else reason
    typed = {o.key_or_group: o for o in parsed}
    preset = str(typed["experiment"].value()) if "experiment" in typed else ""
    made_for = _agent_of_preset(preset, presets)
    chosen = str(typed["agent"].input_line) if "agent" in typed else ""
    agent = chosen.partition("=")[2] or made_for or default_agent()
    for o in parsed:
        block = o.key_or_group
        whole = block in MAIN_KEYS and not isinstance(o.value(), dict)
        if whole and key.startswith(f"{block}."):
            return f"{o.input_line}: {block_reason(block, show(o.value()))}"
    if preset and key.startswith("experiment/") and "@" in key:
        group = key.removeprefix("experiment/").partition("@")[0]
        return f"experiment={preset}: has 'override {group}': write 'override /{group}'"
    if preset and key == "experiment":
        return f"experiment={preset}: its file needs this first line: # @package _global_"
    mine = [o for o in parsed if _sets(o, key)]
    if mine:
        return _unknown(str(mine[0].input_line), key, agent)
    if preset and chosen:
        return (
            f"experiment={preset}: is a preset for {made_for or 'another agent'}, but {chosen} "
            f"was asked for too; {_instead(preset, agent)}"
        )
    blamed = f"experiment={preset}" if preset else "the configuration"
    return f"{blamed}: {key}: {unknown_key(key, agent)}"


def _unknown(typed: str, key: str, agent: str) -> str:
    value = typed.partition("=")[2]
    instead = switch_override(key, value)
    why = write_hint(instead) if instead else why_absent(key, value)
    return f"{typed}: no such key; {why}" if why else f"{typed}: {unknown_key(key, agent)}"


def _sets(override: Override, key: str) -> bool:
    name = override.key_or_group
    inside = key.startswith(f"{name}.") and isinstance(override.value(), dict)
    at = f"{name}@{override.package}"
    return key in (name, at) or name.startswith(f"{key}.") or inside


def unknown_key(key: str, agent: str) -> str:
    """Say what is wrong with a key that does not exist for `agent`."""
    key = key.replace("/", ".")  # a group inside of a group
    why = why_absent(key)
    if why:
        return f"no such key; {why}"
    names = [*ALGORITHMS, *([agent] if agent not in ALGORITHMS and find_entry_point(agent) else [])]
    ours = keys_of("")
    keys = {name: [*ours, *_fields(settings_type(name), "agent.")] for name in names}
    owners = [name for name in keys if key in keys[name]]
    if owners and agent not in owners:
        return f"is a key of {' and '.join(owners)}, and the agent is {agent}"
    main = MAIN_KEYS.get(key) or MAIN_KEYS.get(f"agent.{key}")
    if main:
        return f"no such key; it is {main}"
    own = keys.get(agent, ours)
    theirs = our_key(key, own)
    wanted = theirs or key.rpartition(".")[2]
    for name in sorted(keys, key=lambda name: name != agent):
        same = [known for known in keys[name] if wanted in (known, known.rpartition(".")[2])]
        if theirs and not same:
            continue  # it is another agent's: not what looks alike of this one's
        close = same or _alike(key, keys[name])
        if close and close != [key]:
            whose = "" if close[0] in own else f", a key of {name}"
            others = other_agents_hint(key, own)
            return f"no such key; did you mean {close[0]}{whose}?{unit_hint(key, close[0])}{others}"
    block = key.rpartition(".")[0]
    inside = [each.rpartition(".")[2] for each in own if each.rpartition(".")[0] == block]
    if block in own and len(inside) <= MOST_LISTED:
        return f"no such key; {block} has {', '.join(inside)}"
    return "no such key; --cfg job prints all keys"


def _alike(key: str, known: list[str]) -> list[str]:
    """Return the known key most similar to one without its group: groups they share are no hint."""
    group = key.rpartition(".")[0] + "."
    inside = {each.removeprefix(group): each for each in known if each.startswith(group)}
    name = key.removeprefix(group) if inside else key
    found = get_close_matches(name, inside, n=1, cutoff=0.8)
    if found:
        return [inside[found[0]]]
    names = {each: each for each in known if not each.startswith(group)} | inside
    return [names[each] for each in get_close_matches(name, names, n=1)]


def key_for(name: str, agent: str) -> str | None:
    """Return the full key for a name without its groups, ours or of another trainer, if any."""
    keys = keys_of(agent)
    wanted = our_key(name, keys) or name
    return next((key for key in keys if wanted in (key, key.rpartition(".")[2])), None)


def keys_of(agent: str) -> list[str]:
    """Return the full keys of a run with this agent, of which an unknown one has none."""
    keys = ["agent", "experiment", *_fields(RunSettings, "")]
    if agent in ALGORITHMS:
        keys += _fields(settings_type(agent), "agent.")
    return keys


def write_hint(instead: str) -> str:
    """Return a hint to write an override, or to start a program, instead."""
    films = instead.startswith(command_of("evaluate"))
    return f"film a run: {instead}" if films else f"write {instead}"


def is_switch(key: str, agent: str) -> bool:
    """Return whether a key is true or false."""
    classes: list[tuple[Any, str]] = [(RunSettings, "")]
    if agent in ALGORITHMS:
        classes.append((settings_type(agent), "agent."))
    return any(key in _fields(cls, path, only=bool) for cls, path in classes)


@cache  # a refusal asks several times, and type hints take milliseconds
def _fields(cls: Any, path: str, only: Any = None) -> tuple[str, ...]:
    """Return the full keys of a settings class and those inside of it; `only` those of a type."""
    found: list[str] = []
    for name, hint in get_type_hints(cls).items():
        if only is None or hint == only:
            found.append(path + name)
        if dataclasses.is_dataclass(hint):
            inside: Any = hint
            found += _fields(inside, path + name + ".", only)
    return tuple(found)


def _agent_of_preset(preset: str, presets: Path | None) -> str | None:
    for folder in (CONFIGS, presets) if preset else ():
        path = None if folder is None else folder / "experiment" / f"{preset}.yaml"
        if path is not None and path.is_file():
            found = re.search(r"override /agent: *(\w+)", path.read_text("utf-8", "replace"))
            return found.group(1) if found else None
    return None


def agent_of(typed: Sequence[str], presets: Path | None = None) -> str:
    """Return the agent that a command line chooses, itself or by a preset."""
    chosen = dict(text.lstrip("-").split("=", 1) for text in typed if "=" in text)
    made_for = _agent_of_preset(chosen.get("experiment", ""), presets)
    return chosen.get("agent") or made_for or default_agent()


def default_agent() -> str:
    """Return the agent that trains where none is chosen."""
    found = re.search(r"^ *- agent: *(\w+)", (CONFIGS / "config.yaml").read_text("utf-8"), re.M)
    return found.group(1) if found else next(iter(ALGORITHMS))


def _instead(preset: str, agent: str) -> str:
    other = f"{preset.rpartition('_')[0]}_{agent}"
    exists = (CONFIGS / "experiment" / f"{other}.yaml").exists()
    return f"leave agent={agent} out" + (f", or choose experiment={other}" if exists else "")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [describe(error)]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    cause = error.__cause__
    if cause is not None and str(cause).strip() and str(cause) not in text:
        text += f" ({str(cause).splitlines()[0]})"
    return one_line(text)
