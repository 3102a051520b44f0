"""Why a command does not compose to a configuration, in one line with the nearest that does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from yaml import MarkedYAMLError  # type: ignore[import-untyped]

from steadyrl.core.errors import describe, nearest, one_line, show
from steadyrl.training.config.hints.chosen_agent import agent_of, agent_of_preset
from steadyrl.training.config.hints.keys import explain_unknown, unknown_key
from steadyrl.training.config.hints.other_trainers import (
    MAIN_KEYS,
    VARIANT_NOTES,
    VARIANTS,
    block_reason,
    our_key,
)
from steadyrl.training.config.hints.syntax import explain_syntax
from steadyrl.training.config.hints.values import grouped_hint
from steadyrl.training.config.schema import UnknownKeyError
from steadyrl.training.config.settings import CONFIGS

# Keys whose values are lists, and which are typed without brackets.
LISTS = ("agent.hidden", "env.wrappers", "log.wandb.tags")

SEVERAL = {"seeds": "a list has brackets: 'seeds=[0,1,2]'"}

# Hydra's words for a preset that chooses a group which has a choice.
TWICE = re.compile(
    r"Multiple values for ([\w/]+)\. To override a value use 'override [\w/]+: ([^']+)'"
)
# OmegaConf's words for a list in place of a mapping, and for the reverse.
UNLIKE = re.compile(r"Error merging override (.+) \(Cannot merge DictConfig with ListConfig\)")


def explain(
    error: Exception, overrides: list[str], *, multirun: bool, presets: Path | None = None
) -> str:
    """Return one line: the override that Hydra or OmegaConf refused, and its correction.

    `presets`: the folder of `--config-dir`.
    """
    parsed = []
    for place, text in enumerate(overrides):
        parser = OverridesParser.create()
        try:
            parsed.append(parser.parse_override(text))
        except Exception:  # Hydra's grammar raises its own, ANTLR's and Python's errors
            return explain_syntax(overrides, place)
    for override in parsed:
        reason = _misused(override, multirun=multirun)
        if reason:
            return f"{override.input_line}: {reason}"
    return (
        _explain_file(error, parsed)
        or _explain_merge(error, parsed)
        or _explain_key(error, parsed, presets)
    )


def _explain_file(error: Exception, parsed: list[Override]) -> str | None:
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
            is_typed = preset is None or any(o.key_or_group == group for o in parsed)
            by = "" if is_typed else f"{preset}: override /"
            return f"{by}{group}={name}: no such {group}; {hint}"
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        place = f"{error.problem_mark.name}, line {error.problem_mark.line + 1}"
        return f"{place}: cannot be read: {one_line(error.problem or str(error))}"
    return None


def _no_such_preset(override: Override, choices: Sequence[str]) -> str | None:
    """Return the correction of a preset that is an environment's id, or a path to a file."""
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


def _misused(override: Override, *, multirun: bool) -> str | None:
    """Return why an override that can be read has no effect."""
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
    each = "several values are one run each: add -m (in Python: call train for each)"
    return SEVERAL.get(key, each + grouped_hint(typed.partition("=")[2]))


def _needs_override(parsed: list[Override], group: str, name: str) -> str:
    """Return what to write in the defaults of a preset that chooses a group anew."""
    preset = next((o.input_line for o in parsed if o.key_or_group == "experiment"), "a preset")
    return f"{preset}: its defaults choose {group} anew: write '- override /{group}: {name}'"


def _explain_merge(error: Exception, parsed: list[Override]) -> str | None:
    """Explain a list in place of a mapping, or the reverse."""
    found = UNLIKE.match(_first_line(error))
    typed = found[1].lstrip("+") if found else ""
    for o in parsed:
        if str(o.input_line).lstrip("+") == typed:
            wanted = "mapping, such as {key: value}" if isinstance(o.value(), list) else "list"
            return f"{typed}: must be a {wanted}"
    return None


def _explain_key(error: Exception, parsed: list[Override], presets: Path | None) -> str:
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
    chosen = str(typed["agent"].input_line) if "agent" in typed else ""
    agent = agent_of([str(o.input_line) for o in parsed], presets)
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
        return explain_unknown(str(mine[0].input_line), key, agent)
    if preset and chosen:
        made_for = agent_of_preset(preset, presets) or "another agent"
        return (
            f"experiment={preset}: is a preset for {made_for}, but {chosen} "
            f"was asked for too; {_instead(preset, agent)}"
        )
    blamed = f"experiment={preset}" if preset else "the configuration"
    return f"{blamed}: {key}: {unknown_key(key, agent)}"


def _sets(override: Override, key: str) -> bool:
    name = override.key_or_group
    inside = key.startswith(f"{name}.") and isinstance(override.value(), dict)
    at = f"{name}@{override.package}"
    return key in (name, at) or name.startswith(f"{key}.") or inside


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
