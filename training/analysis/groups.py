"""Runs side by side: in what their configurations differ, and which of them are seeds of one."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from steadyrl.core.errors import SettingError, nearest
from steadyrl.training.analysis.past_runs import METRICS, NoRunError, PastRun, find_runs, read_run
from steadyrl.training.config.overrides import ABOUT_THE_RUN
from steadyrl.training.config.schema import show

SCORES = ("eval/return_mean", "rollout/return_mean")  # the second where there is no first
AGENT, ENV = "agent.name", "env.id"
SHORT = {"agent": AGENT, "env": ENV}
NO_DIFFERENCE = {"seed", *ABOUT_THE_RUN} - {"init_from"}

Config = Mapping[str, Any]  # values by full key


class Group(NamedTuple):
    """Runs that are seeds of one configuration, or were said to belong together."""

    name: str
    env: str
    runs: list[PastRun]


def groups(
    places: Sequence[str], tags: Collection[str], by: Sequence[str] = ()
) -> tuple[list[Group], list[str]]:
    """Read all runs at some places, `NAME=PLACE` or `PLACE`, and put those together that belong.

    What has a name is a group of that name; the others go by the keys in `by`, or else by whatever
    they differ in besides their seed. Runs of different environments are never one group.
    What was matched and is no run is returned in words.
    """
    named: list[tuple[str | None, PastRun]] = []
    known: set[Path] = set()
    left_out: list[str] = []
    for text in places:
        name, place = _split(text)
        runs, empty = find_runs(place)
        mine = f"{name}: " if name else ""
        left_out += [f"{mine}left out {path.name}, which has no {METRICS}" for path in empty]
        for path in runs:
            if name is not None or path.resolve() not in known:
                named.append((name, read_run(path, tags)))
            known.add(path.resolve())
    configs = [run.config for name, run in named if name is None]
    telling = iter(chosen(configs, by) if by else differences(configs))
    found: dict[tuple[str, str], Group] = {}
    for name, run in named:
        shown = name or _title(next(telling), run)
        found.setdefault((run.env, shown), Group(shown, run.env, [])).runs.append(run)
    return list(found.values()), left_out


def _title(telling: Config, run: PastRun) -> str:
    besides = {key: value for key, value in telling.items() if key != ENV}  # shown anyway
    return label(besides) or str(run.config.get(AGENT, "all"))


def _split(text: str) -> tuple[str | None, str]:
    name, equals, place = text.partition("=")
    if not equals or os.path.exists(text) or glob(text):  # Hydra names folders a=1,b=2
        return None, text
    if not name:
        raise NoRunError(f"{text}: before the = stands a name, as in NAME={place}")
    return name, place


def differences(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """Return of each configuration what not all of them share; a seed is no difference.

    Agents and environments have keys and defaults of their own: runs of another agent, or in
    another environment, differ in that and in nothing else.
    """
    # As text: in somebody else's configuration there may be anything.
    kinds = [(str(config.get(AGENT)), str(config.get(ENV))) for config in configs]
    differing: dict[Any, set[str]] = {}
    for kind in set(kinds):
        same = [c for c, of in zip(configs, kinds, strict=True) if of == kind]
        keys = {key for config in same for key in config} - NO_DIFFERENCE
        differing[kind] = {
            key for key in keys if len({repr(config.get(key)) for config in same}) > 1
        }
    named = [name for name, of in ((AGENT, 0), (ENV, 1)) if len({kind[of] for kind in kinds}) > 1]
    return [
        {key: config.get(key) for key in (*named, *sorted(differing[kind]))}
        for config, kind in zip(configs, kinds, strict=True)
    ]


def chosen(configs: Sequence[Config], by: Sequence[str]) -> list[dict[str, Any]]:
    """Return of each configuration the keys to group by; refuse one that none of them has."""
    known = {key for config in configs for key in config}
    keys = [SHORT.get(key, key) for key in by]
    for key in keys:
        if key not in known:
            raise SettingError("--by", key, f"no such key; {nearest(key, sorted(known))}")
    return [{key: config.get(key) for key in keys} for config in configs]


def label(values: Config) -> str:
    """Write what tells a group of runs from others: `ppo, learning_rate=0.001`."""
    names = [key.rpartition(".")[2] for key in values]
    parts = []
    for (key, value), name in zip(values.items(), names, strict=True):
        shown = name if names.count(name) == 1 else key
        parts.append(str(value) if key in (AGENT, ENV) else f"{shown}={show(value)}")
    return ", ".join(parts)


def names(runs: Sequence[PastRun]) -> list[str]:
    """Return short names where they tell the runs apart, else their paths."""
    short = [run.path.name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def notes(group: Group) -> Iterator[str]:
    """Yield what a reader should know of a group's runs."""
    for name, run in zip(names(group.runs), group.runs, strict=True):
        if run.unread:
            yield f"left out {run.unread} lines of {name} that cannot be read"
        if run.going:
            yield f"{name} is still going"
