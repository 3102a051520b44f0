"""Find run directories and read their metrics, configuration and summary."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from steadyrl.core.errors import ExpectedError, describe
from steadyrl.core.files import read_lines
from steadyrl.core.safe_parsing import from_json, read_yaml
from steadyrl.training.checkpoints.run_directory import (
    CONFIG,
    SET_ASIDE,
    in_use,
    read_summary,
    similar,
)
from steadyrl.training.config.overrides import flatten
from steadyrl.training.config.settings import CONFIGS
from steadyrl.training.logging.charts import CHARTS
from steadyrl.training.logging.sinks import LONGEST_LINE, METRICS

MOST_TAGS = 300  # that are read where long files are thinned out, besides those of charts
CHARTED = {"eval/return_std", *(t for of in CHARTS.values() for tags in of.values() for t in tags)}
NO_TAGS = ("step", "wall_seconds")

Series = dict[float, float]  # value by step
Config = Mapping[str, Any]  # value by full key


class NoRunError(ExpectedError):
    """No run was found, or it cannot be read."""

    exit_code = 2


class PastRun(NamedTuple):
    """Configuration, summary and requested metrics of one run."""

    path: Path
    config: Config  # full keys; empty without a config.yaml
    metrics: dict[str, Series]
    seconds: Series
    summary: dict[str, Any]  # empty while the run is in progress
    unread: int  # unreadable lines of metrics.jsonl
    is_running: bool

    @property
    def env(self) -> str:
        """Environment id; "" if unknown."""
        return str(self.config.get("env.id", self.summary.get("env", "")))


def find_runs(place: str) -> tuple[list[Path], list[Path]]:
    """Return the run directories at or below a path or glob pattern, and the paths without one."""
    found = [Path(place)] if os.path.exists(place) else list(map(Path, sorted(glob(place))))
    if not found:
        near = similar(Path(place)) or ": no run directory matches"
        raise NoRunError(f"{place or repr(place)}: no such run{near}")
    below = {path: _runs_below(path) for path in found if path.is_dir()}
    runs = [run for inside in below.values() for run in inside]
    if not below:
        raise NoRunError(f"{place}: is a file; name the run's directory")
    if not runs:
        raise NoRunError(f"{place}: no run in this directory or below")
    return runs, [path for path, inside in below.items() if not inside]


def _runs_below(path: Path) -> list[Path]:
    if not _has_presets(path) and any((path / name).is_file() for name in (METRICS, CONFIG)):
        return [path]
    inside = {each.parent for name in (METRICS, CONFIG) for each in path.rglob(name)}
    return sorted(run for run in inside if not (_has_presets(run) or _is_in_a_run(path, run)))


def _has_presets(path: Path) -> bool:
    """Return whether a directory's `config.yaml` is Hydra's, or that of our presets."""
    return path.name == ".hydra" or (path.name == CONFIGS.name and path.samefile(CONFIGS))


def _is_in_a_run(path: Path, found: Path) -> bool:
    """Return whether a directory below `path` is part of a run: set aside, or a tracker's."""
    above = [each for each in found.parents if each.is_relative_to(path)]
    return SET_ASIDE in found.relative_to(path).parts or any((p / METRICS).is_file() for p in above)


def read_run(
    path: Path,
    tags: Collection[str] | None,
    most: int | None = None,
    *,
    is_running: bool | None = None,
) -> PastRun:
    """Read a run, finished or not; of its metrics only `tags`, see `read_metrics`.

    `is_running` None: ask the lock.
    """
    metrics, seconds, unread = read_metrics(path / METRICS, tags, most)
    running = in_use(path) if is_running is None else is_running
    return PastRun(path, _config(path), metrics, seconds, read_summary(path), unread, running)


def read_metrics(
    path: Path, tags: Collection[str] | None, most: int | None = None
) -> tuple[dict[str, Series], Series, int]:
    """Return values by tag and step, seconds by step, and the number of unreadable lines.

    `tags` None: all. `most`: thin long files out to so many evenly spaced lines with evaluations
    and so many without, the first and the last included, and to MOST_TAGS.
    """
    metrics: dict[str, Series] = {tag: {} for tag in tags or ()}
    seconds: Series = {}
    unread = 0
    chosen = None if most is None else _evenly(path, most)
    for number, line in enumerate(_lines(path)):
        if chosen is not None and number not in chosen:
            continue
        try:
            logged = from_json(line)
            step = int(_number(logged, "step"))
            if step < 0:
                raise ValueError(f"step is {step}")
            wanted = logged.keys() - NO_TAGS if tags is None else (t for t in tags if t in logged)
            found = {tag: _number(logged, tag) for tag in sorted(wanted)}
            if "wall_seconds" in logged:
                seconds[step] = _number(logged, "wall_seconds")
        except (ValueError, TypeError, KeyError, OverflowError):
            unread += 1
            continue
        for tag, value in found.items():
            if tag in metrics or tag in CHARTED or most is None or len(metrics) < MOST_TAGS:
                # A resumed run may log a step twice: the later line counts.
                metrics.setdefault(tag, {})[step] = value
    in_order = {tag: dict(sorted(series.items())) for tag, series in metrics.items() if series}
    return in_order, seconds, unread


def _evenly(path: Path, most: int) -> set[int]:
    """Return the numbers of the lines to read."""
    kinds: tuple[list[int], list[int]] = ([], [])
    for number, line in enumerate(_lines(path)):
        kinds[b'"eval/' in line].append(number)
    return {
        lines[at]
        for lines in kinds
        for at in np.linspace(0, max(len(lines) - 1, 0), min(len(lines), most)).round().astype(int)
    }


def _lines(path: Path) -> Iterator[bytes]:
    try:
        yield from (line for line, _ in read_lines(path, LONGEST_LINE) if line.strip())
    except FileNotFoundError:
        return
    except OSError as error:
        raise NoRunError(f"{path}: cannot be read: {error.strerror}") from None


def _number(logged: Any, key: str) -> float:
    if not isinstance(logged, dict) or isinstance(logged[key], bool):
        raise TypeError("a line must be an object of numbers")
    value = float(logged[key])
    if not math.isfinite(value):
        raise ValueError(f"{key} is {value}")
    return value


def _config(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path / CONFIG)
    except FileNotFoundError:
        return {}
    except Exception as error:  # disk or parser: the file may contain anything
        raise NoRunError(f"{path / CONFIG}: cannot be read: {describe(error)}") from None
    return dict(flatten(values)) if isinstance(values, dict) else {}
