"""Plot a tag of several groups of runs: the mean over seeds with its 95 % confidence interval.

python scripts/plot.py uniform='runs/uniform-*' prioritised='runs/per-*' --out compared.png
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Two-sided 95 % quantiles of Student's t for 2, 3, … runs; seeds are few, 1.96 would lie.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# A run that ends before this part of the longest is left out: the others' end is the end.
SHORTEST = 0.5

Series = dict[int, float]  # values by step


class Curve(NamedTuple):
    """Mean and half-width of its confidence interval over the steps that all runs cover."""

    steps: NDArray[np.int64]  # [S]
    mean: NDArray[np.float64]  # [S]
    half: NDArray[np.float64]  # [S]
    runs: int
    left_out: list[str]  # what is not in the mean, for the reader


def read(run: Path, tag: str) -> tuple[Series, int]:
    """Return the values of `tag` by step, and how many lines of the log could not be read."""
    series: Series = {}
    unread = 0
    for line in (run / "metrics.jsonl").read_bytes().splitlines():
        if not line.strip():
            continue
        try:
            logged = json.loads(line)
            if not isinstance(logged, dict):
                raise TypeError("a line is an object")
            if tag in logged:
                step, value = int(logged["step"]), float(logged[tag])
                if not math.isfinite(value):
                    raise ValueError(f"{tag} is {value}")
                series[step] = value  # where a run was continued, the later line counts
        except (ValueError, TypeError, KeyError, OverflowError):
            unread += 1
    return dict(sorted(series.items())), unread


def aggregate(runs: Mapping[str, Series]) -> Curve:
    """Return the mean over runs, interpolated where their steps differ, and its interval."""
    left_out: list[str] = []
    kept = _long_enough(runs, left_out)
    steps = _grid(kept, left_out)
    values = np.array(
        [np.interp(steps, list(run), list(run.values())) for run in kept.values()]
    )  # [R, S]
    count = len(kept)
    half = np.zeros(len(steps))
    if count > 1:
        quantile = STUDENT_T[min(count - 2, len(STUDENT_T) - 1)]
        half = quantile * values.std(0, ddof=1) / math.sqrt(count)
    return Curve(steps, values.mean(0), half, count, left_out)


def _long_enough(runs: Mapping[str, Series], left_out: list[str]) -> dict[str, Series]:
    end = max(max(run) for run in runs.values())
    kept = {}
    for name, run in runs.items():
        if max(run) < SHORTEST * end:
            left_out.append(f"{name}, which ends at step {max(run):,} of {end:,}")
        else:
            kept[name] = run
    return kept


def _grid(runs: Mapping[str, Series], left_out: list[str]) -> NDArray[np.int64]:
    """Return the steps that all runs cover: those they share, or lie about together.

    With several environments, seeds log at 5,001, 5,002, …; steps nearer to each other than half
    of what usually lies between two are one point, unless a run has both.
    """
    spacing = np.concatenate([np.diff(list(run), prepend=0) for run in runs.values()])
    near = float(np.median(spacing)) / 2
    logged = sorted((step, name) for name, run in runs.items() for step in run)
    points: list[dict[str, int]] = []
    for step, name in logged:
        if not points or name in points[-1] or step - min(points[-1].values()) > near:
            points.append({})
        points[-1][name] = step
    steps = np.array([round(np.mean(list(point.values()))) for point in points])
    late, early = max(runs, key=lambda name: min(runs[name])), min(runs, key=lambda n: max(runs[n]))
    begin, end = min(runs[late]), max(runs[early])
    before = [name for step, name in logged if step < begin - near]
    after = [name for step, name in logged if step > end + near]
    for names, where in (
        (before, f"before step {begin:,}, where {late} begins"),
        (after, f"after step {end:,}, where {early} ends"),
    ):
        if names:
            left_out.append(f"{len(names)} points of {len(set(names))} runs {where}")
    inside = (begin - near <= steps) & (steps <= end + near)
    return steps[inside]


def draw(curves: Mapping[str, Curve], tag: str, out: Path) -> None:
    """Draw all curves into one picture."""
    from matplotlib.figure import Figure  # no pyplot: nothing global keeps the figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        marker = "o" if len(curve.steps) == 1 else None  # a line of one point shows nothing
        axes.plot(curve.steps, curve.mean, marker=marker, label=f"{name} ({curve.runs} seeds)")
        axes.fill_between(
            curve.steps, curve.mean - curve.half, curve.mean + curve.half, alpha=0.2, linewidth=0
        )
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.set_ylabel(tag)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110)


def read_group(pattern: str, tag: str) -> tuple[dict[str, Series], list[str]]:
    """Return the runs that a pattern matches and have the tag, and what was left out of them."""
    runs: dict[str, Series] = {}
    left_out = []
    for path in map(Path, sorted(glob(pattern))):
        if not (path / "metrics.jsonl").is_file():
            if path.is_dir():
                left_out.append(f"{path.name}, which has no metrics.jsonl")
            continue
        series, unread = read(path, tag)
        if unread:
            left_out.append(f"{unread} lines of {path.name} that cannot be read")
        if series:
            runs[str(path)] = series
        else:
            left_out.append(f"{path.name}, which has no {tag}")
    if len({Path(run).name for run in runs}) == len(runs):  # the short names do
        runs = {Path(run).name: series for run, series in runs.items()}
    return runs, left_out


def main() -> None:
    """Read the groups, draw them, print the last values, and name what is not in them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="+", metavar="NAME=GLOB", help="run directories of a group")
    parser.add_argument("--tag", default="eval/return_mean")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    curves = {}
    for group in args.groups:
        name, _, pattern = group.partition("=")
        runs, left_out = read_group(pattern, args.tag)
        if not runs:
            found = "; ".join(left_out) or "no run directory matches"
            parser.error(f"{group}: {found}")
        curve = aggregate(runs)
        curves[name] = curve._replace(left_out=left_out + curve.left_out)
    draw(curves, args.tag, args.out)
    print(f"| group | seeds | mean {args.tag} over the run | at the end | its step |")
    print("|---|---:|---:|---:|---:|")
    for name, curve in curves.items():
        end = f"{curve.mean[-1]:.1f} ± {curve.half[-1]:.1f}"
        print(f"| {name} | {curve.runs} | {curve.mean.mean():.1f} | {end} | {curve.steps[-1]:,} |")
    for name, curve in curves.items():
        for what in curve.left_out:
            print(f"{name}: left out {what}", file=sys.stderr)


if __name__ == "__main__":
    main()
