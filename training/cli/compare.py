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
from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import Any

from steadyrl.core.errors import SettingError, exit_on_error, one_line, printable
from steadyrl.training.analysis.comparison import Row, compare_groups
from steadyrl.training.analysis.groups import SCORES, distinct_seeds, groups
from steadyrl.training.analysis.measures import RSS, SPEED, TREE
from steadyrl.training.analysis.normalised import SCORES as NORMALISED
from steadyrl.training.analysis.normalised import Normaliser
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
    rows = compare_groups(found, args.threshold, remarks.append, normalise)
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
