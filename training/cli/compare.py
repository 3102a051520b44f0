"""Compare runs in a table: score, P(better), steps and time to a threshold, speed and memory.

python scripts/compare.py outputs
python scripts/compare.py runs --by agent --threshold 475 --markdown
python scripts/compare.py uniform='runs/uniform-*' prioritised='runs/per-*' --json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from steadyrl.core.errors import ExpectedError, SettingError, exit_with, one_line
from steadyrl.envs.registration import find_spec, imports_module
from steadyrl.training.analysis.estimates import interval, mean, probability_of_improvement
from steadyrl.training.analysis.groups import SCORES, Group, groups, notes
from steadyrl.training.analysis.measures import RSS, SPEED, TREE, peak, score, speed
from steadyrl.training.analysis.past_runs import NoRunError, PastRun
from steadyrl.training.cli.programs import runs_parser
from steadyrl.training.logging.terminal import safe_stdout


class Row(NamedTuple):
    """The measures of one group; None if unknown."""

    env: str
    group: str
    seeds: int
    score: float
    score_low: float
    score_high: float
    better: float | None = None  # P(a run of the group beats one of the first group)
    better_low: float | None = None
    better_high: float | None = None
    threshold: float | None = None  # score that counts as solved
    solved: int | None = None  # runs that reached it
    steps: float | None = None  # steps to the threshold, median over seeds (never reached: inf)
    seconds: float | None = None
    steps_per_second: float | None = None
    memory_mb: float | None = None  # maximum over seeds


def reached(run: PastRun, threshold: float) -> tuple[float, float]:
    """Return step and seconds of the first score at the threshold; inf if it is never reached."""
    series = next((run.metrics[tag] for tag in SCORES if tag in run.metrics), {})
    for step, value in series.items():
        if value >= threshold:
            return step, run.seconds.get(step, math.nan)
    return math.inf, math.inf


def compare(group: Group, first: Group, threshold: float | None) -> Row:
    """Return a group's row, compared with the group `first`."""
    scores, theirs = (np.array([score(run) for run in g.runs], float) for g in (group, first))
    low, high = interval(scores, mean)
    row = Row(group.env, group.name, len(group.runs), float(mean(scores)), float(low), float(high))
    if group is not first:
        probability, (least, most) = probability_of_improvement(scores, theirs)
        row = row._replace(better=probability, better_low=float(least), better_high=float(most))
    if threshold is not None:
        ends = np.array([reached(run, threshold) for run in group.runs])  # [R, 2]
        steps, seconds = np.quantile(ends, 0.5, axis=0, method="higher").tolist()
        solved = int(np.isfinite(ends[:, 0]).sum())
        row = row._replace(threshold=threshold, solved=solved)
        row = row._replace(steps=_finite(steps), seconds=_finite(seconds))
    speeds = [each for run in group.runs if (each := speed(run)) is not None]
    peaks = [each for run in group.runs if (each := peak(run)) is not None]
    fast = float(np.mean(speeds)) if speeds else None
    return row._replace(steps_per_second=fast, memory_mb=max(peaks, default=None))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def table_rows(
    found: Sequence[Group], threshold: float | None, say: Callable[[str], None]
) -> list[Row]:
    """Return the rows by environment; print notes on runs that were left out."""
    scored: list[Group] = []
    unscored: list[str] = []
    for group in found:
        for note in notes(group):
            say(f"{group.name}: {note}")
        runs = [run for run in group.runs if score(run) is not None]
        for run in group.runs:
            status = run.summary.get("status", "finished")
            if status != "finished" and not run.is_running:
                say(f"{group.name}: {run.path.name} did not finish: {status}")
        unscored += [f"{group.name}: {r.path}" for r in group.runs if score(r) is None]
        if runs:
            scored.append(group._replace(runs=runs))
    if not scored:
        raise NoRunError(f"{unscored[0]} has no evaluations and no returns, like all runs given")
    for what in unscored:
        say(f"{what} is left out: no evaluations and no returns")
    first: dict[str, Group] = {}
    for group in scored:
        first.setdefault(group.env, group)
    of_env = [group for env in first for group in scored if group.env == env]
    wanted = {env: own_threshold(env) if threshold is None else threshold for env in first}
    return [compare(group, first[group.env], wanted[group.env]) for group in of_env]


def own_threshold(env: str) -> float | None:
    """Return the environment's reward threshold; None if it has none."""
    if imports_module(env):  # user code, which need not be imported for a table
        return None
    try:
        return find_spec(env).reward_threshold
    except SettingError:  # the package is not installed
        return None


def cells(row: Row) -> dict[str, str]:
    """Return a row's cells by heading; line breaks keep terminal columns narrow."""
    shown = {
        "group": one_line(row.group),
        "seeds": str(row.seeds),
        "score": _inside("{:,.1f}", row.score, row.score_low, row.score_high),
        "P(better)": _inside("{:.2f}", row.better, row.better_low, row.better_high),
    }
    if row.threshold is not None:
        of = f"\n({row.solved}/{row.seeds})"
        shown[f"steps\nto {row.threshold:g}"] = _shown("{:,.0f}", row.steps, "never") + of
        shown[f"s\nto {row.threshold:g}"] = _shown("{:,.0f}", row.seconds, "never")
    shown["steps/s"] = _shown("{:,.0f}", row.steps_per_second)
    shown["peak\nMB"] = _shown("{:,.0f}", row.memory_mb)
    return shown


def _shown(form: str, value: float | None, unknown: str = "–") -> str:
    return unknown if value is None else form.format(value)


def _inside(form: str, value: float | None, low: float | None, high: float | None) -> str:
    if low is None or high is None or low == high:
        return _shown(form, value)
    return f"{_shown(form, value)}\n[{form.format(low)}, {form.format(high)}]"


def print_markdown(env: str, shown: Sequence[dict[str, str]]) -> None:
    """Print the table of one environment as Markdown."""
    print(f"**{one_line(env)}**\n")
    rows = [list(shown[0]), *(list(row.values()) for row in shown)]
    lines = [f"| {' | '.join(row)} |".replace("\n", " ") for row in rows]
    lines.insert(1, f"|---|{'---:|' * (len(shown[0]) - 1)}")
    print("\n".join(lines), end="\n\n")


def print_table(env: str, shown: Sequence[dict[str, str]]) -> None:
    """Print the table of one environment on the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(
        title=one_line(env), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in shown[0]:
        first = name == "group"
        table.add_column(
            name, justify="left" if first else "right", no_wrap=not first, overflow="fold"
        )
    for row in shown:
        table.add_row(*row.values())
    console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = runs_parser(
        __doc__,
        "score: return of the final weights, mean over seeds with its 95 % interval;",
        "P(better): probability that a run beats one of the environment's first group.",
        "",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="score that counts as solved (default: the environment's reward threshold)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true")
    form.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare runs; errors are printed as one line."""
    try:
        with safe_stdout():
            args = parse(arguments)
        if args.threshold is not None and not math.isfinite(args.threshold):
            raise SettingError("--threshold", args.threshold, "must be finite")
        found, remarks = groups(args.runs, (*SCORES, TREE, RSS, SPEED), args.by)
        rows = table_rows(found, args.threshold, remarks.append)
        with safe_stdout():
            if args.json:
                print(json.dumps([row._asdict() for row in rows], indent=2))
            else:
                for env in dict.fromkeys(row.env for row in rows):
                    shown = [cells(row) for row in rows if row.env == env]
                    (print_markdown if args.markdown else print_table)(env, shown)
    except ExpectedError as error:
        exit_with(error)
    for line in remarks:
        print(one_line(line), file=sys.stderr)
