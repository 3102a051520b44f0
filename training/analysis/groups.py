"""Group runs: which keys differ between them, and which runs are seeds of one configuration."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from steadyrl.core.errors import SettingError, nearest, show
from steadyrl.training.analysis.past_runs import NoRunError, PastRun, find_runs, read_run
from steadyrl.training.config.overrides import ABOUT_THE_RUN
from steadyrl.training.logging.sinks import METRICS

SCORES = ("eval/return_mean", "rollout/return_mean")  # the second if a run has no evaluations
AGENT, ENV = "agent.name", "env.id"
SHORT = {"agent": AGENT, "env": ENV}
# Keys that make no difference to what is learned, nor to how it is evaluated.
NO_DIFFERENCE = {
    "seed", "threads", "stop_timeout", "env.step_timeout", "env.max_restarts", "agent.compile",
    *(key for key in ABOUT_THE_RUN if key != "init_from"),
}  # fmt: skip
NO_DIFFERENCE_BELOW = ("log.", "report.", "profiler.", "checkpoint.", "memory.")

Config = Mapping[str, Any]  # values by full key


class Group(NamedTuple):
    """Runs that are seeds of one configuration, or were given one name."""

    name: str
    env: str
    runs: list[PastRun]


def groups(
    places: Sequence[str],
    tags: Collection[str] | None,
    by: Sequence[str] = (),
    most: int | None = None,
) -> tuple[list[Group], list[str]]:
    """Read all runs at `PLACE` or `NAME=PLACE`; return their groups and notes on what was left out.

    A name makes one group. Other runs are grouped by the keys in `by`, or else by every key that
    differs besides the seed. Runs of different environments are never in one group. `tags` and
    `most` are those of `read_metrics`.
    """
    named: list[tuple[str | None, PastRun]] = []
    known: set[Path] = set()
    left_out: list[str] = []
    for text in places:
        name, place = _split(text)
        runs, empty = find_runs(place)
        prefix = f"{name}: " if name else ""
        left_out += [f"{prefix}left out {path.name}, which has no {METRICS}" for path in empty]
        for path in runs:
            if name is not None or path.resolve() not in known:
                named.append((name, read_run(path, tags, most)))
            known.add(path.resolve())
    configs = [run.config for name, run in named if name is None]
    distinct = iter(select_keys(configs, by) if by else differences(configs))
    found: dict[tuple[str, str], Group] = {}
    for name, run in named:
        shown = name or _title(next(distinct), run)
        found.setdefault((run.env, shown), Group(shown, run.env, [])).runs.append(run)
    return list(found.values()), left_out


def distinct_seeds(found: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """Return groups without runs that repeat another's configuration and seed, and notes on these.

    Such a run is no further sample. One that finished stays, else the longest, of equals the last.
    """
    kept, left_out = [], []
    for group in found:
        repeats: dict[object, list[PastRun]] = {}
        for run in group.runs:
            repeats.setdefault(_identity(run), []).append(run)
        stays = [max(reversed(same), key=_progress) for same in repeats.values()]
        kept.append(group._replace(runs=stays))
        for stay, same in zip(stays, repeats.values(), strict=True):
            others = [run for run in same if run is not stay]
            if others:
                count = "twice" if len(same) == 2 else f"{len(same)} times"
                what = f"seed {same[0].config.get('seed')} {count} with the same settings"
                left_out.append(f"{group.name}: {what}: left out {', '.join(names(others))}")
    return kept, left_out


def _identity(run: PastRun) -> object:
    """Return what runs have in common that are the same experiment."""
    if "seed" not in run.config:
        return id(run)  # of another program
    keys = (key for key in run.config if key == "seed" or is_difference(key))
    own = ((key, _text(run.config[key])) for key in keys if not key.startswith("eval."))
    return tuple(sorted(own))


def is_difference(key: str) -> bool:
    """Return whether runs with different values of this key are different experiments."""
    return key not in NO_DIFFERENCE and not key.startswith(NO_DIFFERENCE_BELOW)


def _text(value: Any) -> str:
    """Return text that is equal for equal values, however they were typed: 100_000 and 1e5."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, bool):
        return repr(show(value))  # `true` is a choice of some keys
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    return repr(value)  # values of foreign configurations may be unhashable


def _progress(run: PastRun) -> tuple[bool, float]:
    """Return whether the run finished, and its last step."""
    steps = max((max(series) for series in run.metrics.values()), default=-1.0)
    return run.summary.get("status") == "finished", steps


def _title(distinct: Config, run: PastRun) -> str:
    besides = {key: value for key, value in distinct.items() if key != ENV}  # shown anyway
    return label(besides) or str(run.config.get(AGENT, "all"))


def _split(text: str) -> tuple[str | None, str]:
    name, equals, place = text.partition("=")
    if not equals or os.path.exists(text) or glob(text):  # Hydra names folders a=1,b=2
        return None, text
    if not name:
        raise NoRunError(f"{text}: write a name before the =, as in NAME={place}")
    return name, place


def differences(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """Return, per configuration, the keys whose values differ; the seed does not count.

    Different agents or environments have different keys and defaults, so such runs differ by agent
    or environment only. But a configuration has one name in all environments, also in those that
    have runs of no other one.
    """
    kinds = [(str(config.get(AGENT)), str(config.get(ENV))) for config in configs]
    differing: dict[str, set[str]] = {}  # by agent
    for kind in set(kinds):
        same = [c for c, of in zip(configs, kinds, strict=True) if of == kind]
        keys = {key for config in same for key in config if is_difference(key)}
        differing.setdefault(kind[0], set()).update(
            key for key in keys if len({_text(config.get(key)) for config in same}) > 1
        )
    named = [name for name, of in ((AGENT, 0), (ENV, 1)) if len({kind[of] for kind in kinds}) > 1]
    return [
        {key: config.get(key) for key in (*named, *sorted(differing[agent]))}
        for config, (agent, _) in zip(configs, kinds, strict=True)
    ]


def select_keys(configs: Sequence[Config], by: Sequence[str]) -> list[dict[str, Any]]:
    """Return, per configuration, the values of the keys `by`; refuse unknown keys."""
    known = {key for config in configs for key in config}
    keys = [SHORT.get(key, key) for key in by]
    for key in keys:
        if key not in known:
            raise SettingError("--by", key, f"no such key; {nearest(key, sorted(known))}")
    return [{key: config.get(key) for key in keys} for config in configs]


def label(values: Config) -> str:
    """Return a group's label: `ppo, learning_rate=0.001`."""
    names = [key.rpartition(".")[2] for key in values]
    parts = []
    for (key, value), name in zip(values.items(), names, strict=True):
        shown = name if names.count(name) == 1 else key
        parts.append(str(value) if key in (AGENT, ENV) else f"{shown}={show(value, whole=True)}")
    return ", ".join(parts)


def names(runs: Sequence[PastRun]) -> list[str]:
    """Return the runs' directory names if unique, else their paths."""
    short = [run.path.name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def end_of_unfinished(run: PastRun) -> str:
    """Return how a run ended that did not finish; "" if it did, or is running."""
    status: str = run.summary.get("status", "killed" if run.config else "finished")
    return "" if status == "finished" or run.is_running else status


def notes(group: Group) -> Iterator[str]:
    """Yield notes on a group's runs: unreadable lines, runs still in progress."""
    for name, run in zip(names(group.runs), group.runs, strict=True):
        if run.unread:
            yield f"left out {run.unread} unreadable lines of {name}"
        if run.is_running:
            yield f"{name} is still running"
