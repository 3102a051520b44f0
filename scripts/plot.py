"""Plot a tag of several groups of runs: the mean over seeds with its 95 % confidence interval.

python scripts/plot.py uniform='runs/uniform-*' prioritised='runs/per-*' --out compared.png
"""

from __future__ import annotations

import argparse
import json
import math
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Two-sided 95 % quantiles of Student's t for 2, 3, … runs; seeds are few, 1.96 would lie.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Curve(NamedTuple):
    """Mean and half-width of its confidence interval at every step that all runs logged."""

    steps: NDArray[np.int64]  # [S]
    mean: NDArray[np.float64]  # [S]
    half: NDArray[np.float64]  # [S]
    runs: int


def read(run: Path, tag: str) -> dict[int, float]:
    """Return the values of `tag` by step."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[tag] for line in lines if tag in line}


def aggregate(runs: list[dict[int, float]]) -> Curve:
    """Return the mean over runs at the steps they share, and the half-width of its interval."""
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    values = np.array([[run[step] for step in steps] for run in runs])  # [R, S]
    count = len(runs)
    half = np.zeros(len(steps))
    if count > 1:
        quantile = STUDENT_T[min(count - 2, len(STUDENT_T) - 1)]
        half = quantile * values.std(0, ddof=1) / math.sqrt(count)
    return Curve(np.array(steps), values.mean(0), half, count)


def draw(curves: dict[str, Curve], tag: str, out: Path) -> None:
    """Draw all curves into one picture."""
    from matplotlib.figure import Figure  # no pyplot: nothing global keeps the figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(curve.steps, curve.mean, label=f"{name} ({curve.runs} seeds)")
        axes.fill_between(
            curve.steps, curve.mean - curve.half, curve.mean + curve.half, alpha=0.2, linewidth=0
        )
    axes.set_xlabel("environment steps")
    axes.set_ylabel(tag)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Read the groups, draw them, and print the last values."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="+", metavar="NAME=GLOB", help="run directories of a group")
    parser.add_argument("--tag", default="eval/return_mean")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    curves = {}
    for group in args.groups:
        name, _, pattern = group.partition("=")
        found = [
            Path(path) for path in sorted(glob(pattern)) if Path(path, "metrics.jsonl").exists()
        ]
        if not found:
            parser.error(f"{group}: no run directory matches")
        runs = [read(run, args.tag) for run in found]
        if not set.intersection(*(set(run) for run in runs)):
            parser.error(f"{group}: the runs share no step with {args.tag}")
        curves[name] = aggregate(runs)
    draw(curves, args.tag, args.out)
    print(f"| group | seeds | mean {args.tag} over the run | at the end |\n|---|---:|---:|---:|")
    for name, curve in curves.items():
        end = f"{curve.mean[-1]:.1f} ± {curve.half[-1]:.1f}"
        print(f"| {name} | {curve.runs} | {curve.mean.mean():.1f} | {end} |")


if __name__ == "__main__":
    main()
