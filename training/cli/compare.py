"""Compare runs in a table: score, P(better), steps and time to a threshold, speed and memory.

python scripts/compare.py outputs
python scripts/compare.py runs --by agent --threshold 475 --sort steps --markdown
python scripts/compare.py uniform='runs/uniform-*' prioritised='runs/per-*' --csv
python scripts/compare.py runs --by agent --normalise atari
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import numpy as np

from steadyrl.core.errors import SettingError, exit_on_error, one_line, printable
from steadyrl.envs.registration import find_spec, imports_module
from steadyrl.training.analysis.estimates import (
    Array,
    interval,
    mean,
    probability_of_improvement,
)
from steadyrl.training.analysis.groups import SCORES, Group, distinct_seeds, groups, notes
from steadyrl.training.analysis.measures import RSS, SPEED, TREE, peak, score, score_tags, speed
from steadyrl.training.analysis.normalised import SCORES as NORMALISED
from steadyrl.training.analysis.normalised import Normaliser, iqm
from steadyrl.training.analysis.past_runs import NoRunError, PastRun
from steadyrl.training.cli.programs import runs_parser
from steadyrl.training.logging.terminal import safe_stdout
from steadyrl.training.logging.terminal import score as score_text

GAP = 2  # spaces before a column
MOST_LINES = 4  # of a group's label
# Columns to sort by: field, and 1 or -1 for the lowest or the highest first; 0: text.
SORTS = {
    "group": ("group", 0),
    "seeds": ("seeds", -1),
    "score": ("score", -1),
    "normalised": ("normalised", -1),
    "better": ("better", -1),
    "steps": ("steps", 1),
    "seconds": ("seconds", 1),
    "speed": ("steps_per_second", -1),
    "memory": ("memory_mb", 1),
}


class Row(NamedTuple):
    """The measures of one group; None if unknown.

    The row of a group's runs in all games has their number and interquartile mean only.
    """

    env: str
    group: str
    seeds: int
    score: float | None = None
    score_low: float | None = None
    score_high: float | None = None
    better: float | None = None  # P(a run of the group beats one of the first group)
    better_low: float | None = None
    better_high: float | None = None
    threshold: float | None = None  # score that counts as solved
    solved: int | None = None  # runs that reached it
    steps: float | None = None  # steps to the threshold, median over seeds (never reached: inf)
    seconds: float | None = None
    steps_per_second: float | None = None
    memory_mb: float | None = None  # maximum over seeds
    normalised: float | None = None  # 0: a random policy, 1: a human
    normalised_low: float | None = None
    normalised_high: float | None = None


def reached(run: PastRun, tag: str, threshold: float) -> tuple[float, float]:
    """Return step and seconds of the first score at the threshold; inf if it is never reached."""
    for step, value in run.metrics[tag].items():
        if value >= threshold:
            return step, run.seconds.get(step, math.nan)
    return math.inf, math.inf


def scores_of(group: Group, tag: str) -> Array:
    """Return the scores of a group's runs."""
    return np.array([score(run, tag) for run in group.runs], float)


def compare(
    group: Group,
    first: Group,
    tag: str,
    threshold: float | None,
    normalise: Normaliser | None = None,
) -> Row:
    """Return a group's row, compared with the group `first`; all runs have the `tag`."""
    scores, theirs = scores_of(group, tag), scores_of(first, tag)
    low, high = interval(scores, mean)
    row = Row(group.env, group.name, len(group.runs), float(mean(scores)), float(low), float(high))
    if normalise is not None:
        centre, *ends = normalise(group.env, np.array([row.score, low, high])).tolist()
        row = row._replace(normalised=centre, normalised_low=ends[0], normalised_high=ends[1])
    if group is not first:
        probability, (least, most) = probability_of_improvement(scores, theirs)
        row = row._replace(better=probability, better_low=float(least), better_high=float(most))
    if threshold is not None:
        reaches = np.array([reached(run, tag, threshold) for run in group.runs])  # [R, 2]
        steps, seconds = np.quantile(reaches, 0.5, axis=0, method="higher").tolist()
        solved = int(np.isfinite(reaches[:, 0]).sum())
        row = row._replace(threshold=threshold, solved=solved)
        row = row._replace(steps=_finite(steps), seconds=_finite(seconds))
    speeds = [each for run in group.runs if (each := speed(run)) is not None]
    peaks = [each for run in group.runs if (each := peak(run)) is not None]
    fast = float(np.mean(speeds)) if speeds else None
    return row._replace(steps_per_second=fast, memory_mb=max(peaks, default=None))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def over_games(
    scored: Sequence[Group], tags: Mapping[str, str], normalise: Normaliser
) -> list[Row]:
    """Return the interquartile mean of each group's runs in all games; none for a single game."""
    games: dict[str, dict[str, Array]] = {}
    for group in scored:
        scores = scores_of(group, tags[group.env])
        games.setdefault(group.name, {})[group.env] = normalise(group.env, scores)
    rows = []
    for name, of_env in games.items() if len({group.env for group in scored}) > 1 else ():
        centre, (low, high) = iqm([*of_env.values()])
        runs = sum(map(len, of_env.values()))
        row = Row(f"interquartile mean of {len(of_env)} games", name, runs)
        rows.append(
            row._replace(normalised=centre, normalised_low=float(low), normalised_high=float(high))
        )
    return sorted(rows, key=lambda row: row.env)


def table_rows(
    found: Sequence[Group],
    threshold: float | None,
    say: Callable[[str], None],
    normalise: Normaliser | None,
) -> list[Row]:
    """Return the rows by environment; print notes on runs that were left out."""
    scored: list[Group] = []
    unscored: list[tuple[str, str]] = []  # a run, what it lacks, and how it ended
    tags = score_tags(found)
    for group in found:
        tag = tags[group.env]
        for note in notes(group):
            say(f"{group.name}: {note}")
        runs = [run for run in group.runs if score(run, tag) is not None]
        for run in group.runs:
            status = run.summary.get("status", "killed" if run.config else "finished")
            unfinished = status != "finished" and not run.is_running
            if score(run, tag) is None:
                returned = SCORES[1] in run.metrics
                lacks = ", which other runs have" if returned else " and no returns"
                end = f" ({status})" if unfinished else ""
                unscored.append((f"{group.name}: {run.path}", f"no evaluations{lacks}{end}"))
            elif unfinished:
                say(f"{group.name}: {run.path.name} did not finish: {status}")
        if runs:
            scored.append(group._replace(runs=runs))
    if not scored:
        raise NoRunError(f"{unscored[0][0]} has no evaluations and no returns, like all runs given")
    for what, why in unscored:
        say(f"{what} is left out: {why}")
    first: dict[str, Group] = {}
    for group in scored:
        first.setdefault(group.env, group)
    of_env = [group for env in first for group in scored if group.env == env]
    wanted = {env: own_threshold(env) if threshold is None else threshold for env in first}
    rows = [
        compare(group, first[group.env], tags[group.env], wanted[group.env], normalise)
        for group in of_env
    ]
    return rows if normalise is None else [*rows, *over_games(scored, tags, normalise)]


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
    name = " ".join(printable(row.group).split())
    normalised = _inside("{:.3f}".format, row.normalised, row.normalised_low, row.normalised_high)
    if row.score is None:
        return {"group": name, "runs": str(row.seeds), "normalised": normalised}
    shown = {
        "group": name,
        "seeds": str(row.seeds),
        "score": _inside(_return, row.score, row.score_low, row.score_high),
        "P(better)": _inside("{:.2f}".format, row.better, row.better_low, row.better_high),
    }
    if row.normalised is not None:
        shown["normalised"] = normalised
    if row.threshold is not None:
        solved = f"{row.solved} of {row.seeds} run{'' if row.seeds == 1 else 's'}"
        # The median is of all runs; where it is not there, some may have got there all the same.
        unknown = "–" if row.solved else "never"
        steps = _shown("{:,.0f}".format, row.steps, unknown)
        shown[f"steps\nto {row.threshold:g}"] = f"{steps}\n{solved}"
        shown[f"s\nto {row.threshold:g}"] = _shown("{:,.0f}".format, row.seconds, unknown)
    shown["steps/s"] = _shown("{:,.0f}".format, row.steps_per_second)
    shown["peak\nMB"] = _shown("{:,.0f}".format, row.memory_mb)
    return shown


def _return(value: float) -> str:
    return score_text(value, separator=",")


def _shown(form: Callable[[float], str], value: float | None, unknown: str = "–") -> str:
    return unknown if value is None else form(value)


def _inside(
    form: Callable[[float], str], value: float | None, low: float | None, high: float | None
) -> str:
    if low is None or high is None or low == high:
        return _shown(form, value)
    return f"{_shown(form, value)}\n[{form(low)}, {form(high)}]"


def print_markdown(env: str, shown: Sequence[dict[str, str]]) -> None:
    """Print the table of one environment as Markdown."""
    print(f"**{one_line(env)}**\n")
    rows = [list(shown[0]), *(list(row.values()) for row in shown)]
    texts = [[cell.replace("\n", " ").replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in texts]
    lines.insert(1, f"|---|{'---:|' * (len(shown[0]) - 1)}")
    print("\n".join(lines), end="\n\n")


def print_table(env: str, shown: Sequence[dict[str, str]]) -> None:
    """Print the table of one environment: labels over the whole width, numbers below each."""
    width = shutil.get_terminal_size().columns
    names = [name for name in shown[0] if name != "group"]
    blocks = [[name.split("\n") for name in names]]
    blocks += [[row[name].split("\n") for name in names] for row in shown]
    widths = [
        GAP + max(len(line) for block in blocks for line in block[i]) for i in range(len(names))
    ]
    fitting = sum(total <= width for total in accumulate(widths))
    print(one_line(env))
    for block, row in zip(blocks, ({"group": ""}, *shown), strict=True):
        if row["group"]:
            print("\n".join(["", *label_lines(row["group"], width)]))
        for line in zip_longest(*block[:fitting], fillvalue=""):
            print("".join(text.rjust(w) for text, w in zip(line, widths, strict=False)).rstrip())
    if fitting < len(names):
        left_out = ", ".join(name.replace("\n", " ") for name in names[fitting:])
        print(f"\nnot in {width} columns: {left_out} (--csv, --json and --markdown have them)")
    print()


def label_lines(label: str, width: int) -> list[str]:
    """Return a group's label in lines that break between keys only, the last ones left out."""
    lines = [""]
    parts = label.split(", ")
    for at, part in enumerate(parts):
        text = part if at == len(parts) - 1 else f"{part},"
        longer = f"{lines[-1]} {text}".strip()
        if not lines[-1] or len(longer) <= width:
            lines[-1] = longer
        elif len(lines) < MOST_LINES:
            lines.append(text)
        else:
            return [*lines, f"… and {len(parts) - at} more keys (--by chooses keys)"]
    return lines


def ordered(rows: Sequence[Row], key: str) -> list[Row]:
    """Return the rows sorted by a column, the best first; environments stay in their order."""
    field, sign = SORTS[key]
    envs = list(dict.fromkeys(row.env for row in rows))

    def rank(row: Row) -> tuple[Any, ...]:
        value = getattr(row, field)
        known = () if value is None else (sign * value if sign else value,)
        return envs.index(row.env), value is None, known

    return sorted(rows, key=rank)


def print_csv(rows: Sequence[Row]) -> None:
    """Print all rows as CSV, with the columns of the JSON output."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)


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
    parser.add_argument(
        "--sort", choices=SORTS, metavar="COLUMN", help=f"best first: {', '.join(SORTS)}"
    )
    parser.add_argument(
        "--normalise",
        choices=NORMALISED,
        help="scores from 0 (random) to 1 (human), and their interquartile mean over games",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true")
    form.add_argument("--csv", action="store_true")
    form.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Compare runs; errors are printed as one line."""
    with safe_stdout():
        args = parse(arguments)
    if args.threshold is not None and not math.isfinite(args.threshold):
        raise SettingError("--threshold", args.threshold, "must be finite")
    found, remarks = groups(args.runs, (*SCORES, TREE, RSS, SPEED), args.by)
    found, repeats = distinct_seeds(found)
    remarks += repeats
    normalise = None if args.normalise is None else Normaliser(args.normalise)
    rows = table_rows(found, args.threshold, remarks.append, normalise)
    if args.sort:
        rows = ordered(rows, args.sort)
    with safe_stdout():
        if args.csv:
            print_csv(rows)
        elif args.json:
            print(json.dumps([row._asdict() for row in rows], indent=2))
        else:
            for env in dict.fromkeys(row.env for row in rows):
                shown = [cells(row) for row in rows if row.env == env]
                (print_markdown if args.markdown else print_table)(env, shown)
    for line in remarks:
        print(one_line(line), file=sys.stderr)
