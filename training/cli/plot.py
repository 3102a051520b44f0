"""Plot learning curves of runs: score, speed and memory, aggregated over seeds with intervals.

python scripts/plot.py outputs --out curves.png
python scripts/plot.py runs --by agent,env --x seconds
python scripts/plot.py uniform='runs/uniform-*' prioritised='runs/per-*' --tag eval/return_mean
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from steadyrl.core.command.typed import install_command
from steadyrl.core.errors import SettingError, did_you_mean, exit_on_error, one_line
from steadyrl.training.analysis.curves import Curve, curve_of, limits
from steadyrl.training.analysis.estimates import Estimator, interquartile_mean, mean
from steadyrl.training.analysis.groups import (
    SCORES,
    Group,
    distinct_seeds,
    end_of_unfinished,
    groups,
    names,
    notes,
)
from steadyrl.training.analysis.past_runs import NoRunError
from steadyrl.training.analysis.pictures import save_figure
from steadyrl.training.cli.programs import runs_parser, validate_out
from steadyrl.training.logging.terminal import safe_stdout, score

MEASURES = ("time/steps_per_second", "memory/rss_mb", "memory/tree_pss_mb")  # y axis starts at 0
TAGS = (SCORES[0], *MEASURES[:2])
UNITS = {
    "eval/return_mean": "evaluated return",
    "rollout/return_mean": "return, mean of recent episodes",
    "time/steps_per_second": "speed (environment steps/s)",
    "memory/rss_mb": "memory of the process (MB)",
    "memory/tree_pss_mb": "memory with workers (MB)",
}
AXES = {"steps": "environment steps", "seconds": "wall time (s)"}
LAST_OF = {"steps": "step", "seconds": "second"}
# Okabe and Ito's colour-blind safe palette without yellow; then again with other line styles.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STROKES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
LEGEND_LINE = 0.24  # inches
ESTIMATORS: dict[str, Estimator] = {"mean": mean, "iqm": interquartile_mean}


Panels = dict[tuple[str, str], dict[str, Curve]]  # by (tag, environment), then by group


def draw(panels: Panels, over: str, estimator: str, out: Path) -> None:
    """Plot one row of panels per tag, one column per environment."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in global state

    tags, envs = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    labels = legend(panels)
    columns = 1 if max(map(len, labels.values())) > 45 else 2 * len(envs)
    lines = -(-len(labels) // columns)
    size = (max(7.0, 5.2 * len(envs)), 1.2 + 2.9 * len(tags) + LEGEND_LINE * max(0, lines - 8))
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    axes = figure.subplots(len(tags), len(envs), squeeze=False, sharex="col")
    handles: dict[str, Any] = {}
    for row, tag in enumerate(tags):
        for column, env in enumerate(envs):
            panel, curves = axes[row][column], panels.get((tag, env), {})
            for name, curve in curves.items():
                handles[labels[name]] = _draw_curve(panel, curve, list(labels).index(name))
            _frame(panel, list(curves.values()), least=0.0 if tag in MEASURES else -math.inf)
            panel.set_ylabel(UNITS.get(tag, tag))
    for column, env in enumerate(envs):
        axes[0][column].set_title(env)
        axes[-1][column].set_xlabel(AXES[over])
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns)
    shown = estimator.replace("iqm", "interquartile mean")
    several = any(curve.runs > 1 for curves in panels.values() for curve in curves.values())
    title = f"{shown} over seeds with its 95 % bootstrap interval" if several else "one seed each"
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, out)


def legend(panels: Panels) -> dict[str, str]:
    """Return each group's legend label with its number of seeds."""
    counts: dict[str, set[int]] = {}
    for curves in panels.values():
        for name, curve in curves.items():
            counts.setdefault(name, set()).add(curve.runs)
    return {
        name: f"{name} ({'–'.join(map(str, sorted(many)))} seed{'' if many == {1} else 's'})"
        for name, many in counts.items()
    }


def _draw_curve(panel: Any, curve: Curve, index: int) -> Any:
    colour = COLOURS[index % len(COLOURS)]
    stroke = STROKES[index // len(COLOURS) % len(STROKES)]
    marker = "o" if len(curve.x) == 1 else None  # a line of one point is invisible
    if curve.runs > 1:
        panel.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
    return panel.plot(curve.x, curve.centre, stroke, color=colour, marker=marker)[0]


def _frame(panel: Any, curves: Sequence[Curve], *, least: float) -> None:
    """Set grid and limits; clip the band of few seeds, which may be far wider than the lines."""
    panel.grid(alpha=0.3)
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    panel.yaxis.set_major_formatter(lambda y, _: f"{y:,.6g}")
    if not curves:
        panel.text(0.5, 0.5, "nothing logged", ha="center", transform=panel.transAxes)
        return
    panel.set_ylim(*limits(curves, least))


def panels_of(found: Sequence[Group], tags: Sequence[str], over: str, estimator: str) -> Panels:
    """Return all curves; raise NoRunError if no run has the first tag."""
    panels: Panels = {}
    for tag in tags:
        for group in found:
            curve = curve_of(group, tag, over, ESTIMATORS[estimator])
            if curve is not None:
                panels.setdefault((tag, group.env), {})[group.name] = curve
    if not any(tag == tags[0] for tag, _ in panels):
        runs = [name for group in found for name in names(group.runs)]
        reason = f"{runs[0]} has no {tags[0]}, like all {len(runs)} runs given"
        hint = "" if tags[0] in (known := (*TAGS, *SCORES)) else did_you_mean(tags[0], known)
        raise NoRunError(f"{reason}; {hint}" if hint else reason)
    return panels


def report(panels: Panels, found: Sequence[Group], tag: str, over: str) -> None:
    """Print the final values of the first tag, and to stderr what was left out."""
    print(f"| group | seeds | mean {tag} over the run | final | last {LAST_OF[over]} |")
    print("|---|---:|---:|---:|---:|")
    many = len({env for _, env in panels}) > 1
    for (of, env), curves in panels.items():
        for name, curve in curves.items() if of == tag else ():
            where = f"{env}: {name}" if many else name
            inside = f" [{score(curve.low[-1])}, {score(curve.high[-1])}]" if curve.runs > 1 else ""
            end = f"{score(curve.centre[-1])}{inside}"
            mean_over = score(curve.centre.mean())
            print(
                f"| {one_line(where)} | {curve.runs} | {mean_over} | {end} | {curve.x[-1]:,.0f} |"
            )
    for group in found:
        remarks = list(notes(group))
        remarks += [
            f"{run.path.name} did not finish: {end}"
            for run in group.runs
            if run.summary and (end := end_of_unfinished(run))
        ]
        for (of, env), curves in panels.items():
            if of == tag and env == group.env and group.name in curves:
                remarks += [f"left out {what}" for what in curves[group.name].left_out]
        for line in remarks:
            print(one_line(f"{group.name}: {line}"), file=sys.stderr)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = runs_parser(__doc__)
    parser.add_argument("--x", choices=AXES, default="steps")
    parser.add_argument("--tag", action="append", help="metric to plot; may be repeated")
    parser.add_argument(
        "--estimator", choices=ESTIMATORS, default="mean", help="how to aggregate seeds"
    )
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    return parser.parse_args(arguments)


def plot(args: argparse.Namespace) -> None:
    """Read the groups, plot them, and print final values and what was left out."""
    validate_out(args.out)
    has_format = args.out.suffix[1:].isalpha()  # "compared-1.5" has none
    out = args.out if has_format else args.out.with_name(f"{args.out.name}.png")
    found, left_out = groups(args.runs, args.tag or (*TAGS, SCORES[1]), args.by)
    found, repeats = distinct_seeds(found)
    left_out += repeats
    tags = args.tag
    if not tags:
        evaluated = any(TAGS[0] in run.metrics for group in found for run in group.runs)
        tags = [TAGS[0] if evaluated else SCORES[1], *TAGS[1:]]
    panels = panels_of(found, tags, args.x, args.estimator)
    try:
        draw(panels, args.x, args.estimator, out)
    except ModuleNotFoundError as error:
        raise NoRunError(f"plots need {error.name}: {install_command('plot')}") from None
    except (OSError, ValueError) as error:  # missing folder, or unknown format
        raise SettingError("--out", out, f"cannot be written: {error}") from None
    report(panels, found, tags[0], args.x)
    for line in left_out:
        print(one_line(line), file=sys.stderr)
    print(f"\nplot: {out}")


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Plot; errors are printed as one line."""
    with safe_stdout():
        plot(parse(arguments))
