"""Draw the charts of the pages from docs/data: learning curves, memory, races.

`python docs/pictures.py` draws them, `--check` says whether they are as they would be drawn, and
`--add CHART PANEL LINE COMMAND RUN …` adds the curves of runs to docs/data/curves.jsonl.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

DOCS = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))

from steadyrl.training.cli.checks.machine import processor  # noqa: E402
from steadyrl.training.report.chart import short, ticks  # noqa: E402

CURVES, RACE = DOCS / "data" / "curves.jsonl", DOCS / "data" / "race.jsonl"
WIDTH, PANEL, LEFT, RIGHT = 520, 190, 52, 500  # small, so that a phone shows letters of 9 pixels
HEAD, FOOT, ROW, NAMES = 30, 26, 20, 164
MOST_POINTS = 200
CONTESTANTS = ("SteadyRL", "Stable-Baselines3", "rejax")
# Colours of Okabe and Ito, safe for the colour-blind; lighter in the dark.
STYLE = """text{font:13px system-ui,sans-serif;fill:#1c2733}.soft{fill:#5b6b7b;font-size:12px}
.end{text-anchor:end}.middle{text-anchor:middle}.title{font-weight:600}.back{fill:#fff}
.grid{stroke:#d9e0e6;fill:none}.mark{stroke:#d55e00;stroke-dasharray:3 3}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.band{opacity:.2;stroke:none}
.c0{--c:#0072b2}.c1{--c:#d55e00}.c2{--c:#009e73}.c3{--c:#b3589a}
.line{stroke:var(--c)}.band,.bar{fill:var(--c)}
@media(prefers-color-scheme:dark){text{fill:#e4e9ee}.soft{fill:#9aa7b4}.back{fill:#161b22}
.grid{stroke:#313b45}.c0{--c:#5cb0ea}.c1{--c:#ff8a3d}.c2{--c:#3fcf9f}.c3{--c:#e79bc4}}"""


class Chart(NamedTuple):
    """What a chart of curves shows: a metric over environment steps."""

    says: str
    tag: str = "eval/return_mean"
    from_zero: bool = False


SEEDS = "return of 20 greedy episodes over steps; bands: lowest to highest seed"
CHARTS = {
    "learning": Chart(SEEDS, from_zero=True),
    "mujoco": Chart(SEEDS),
    "pong": Chart("return of 100 training games over steps; marks: resumed", "rollout/return_mean"),
    "memory": Chart("resident memory in MB over steps", "memory/rss_mb", from_zero=True),
}


class Line(NamedTuple):
    """A line of a chart: its mean at each step, the lowest and highest seed, and marked steps."""

    label: str
    steps: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    marks: Sequence[float]


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a data file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def lines_of(runs: Sequence[dict[str, Any]]) -> list[Line]:
    """Return a line for every label, over the steps that all its seeds have."""
    found = []
    for label in dict.fromkeys(run["line"] for run in runs):
        of = [dict(zip(r["steps"], r["values"], strict=True)) for r in runs if r["line"] == label]
        steps = sorted(set.intersection(*map(set, of)))
        at = [[values[step] for values in of] for step in steps]
        means = [sum(values) / len(values) for values in at]
        marks = [step for r in runs if r["line"] == label for step in r.get("resumed", ())]
        lows, highs = [min(v) for v in at], [max(v) for v in at]
        found.append(Line(label, steps, means, lows, highs, marks))
    return found


def curves(name: str, data: Sequence[dict[str, Any]]) -> str:
    """Return a chart with a panel for each environment, below one another."""
    runs, chart = [run for run in data if run["chart"] == name], CHARTS[name]
    body, top = [_text(12, 20, chart.says, "soft")], float(HEAD)
    for title in dict.fromkeys(run["panel"] for run in runs):
        lines = lines_of([run for run in runs if run["panel"] == title])
        body += _panel(title, lines, top, from_zero=chart.from_zero)
        top += HEAD + PANEL + FOOT
        x = float(LEFT)
        for at, line in enumerate(lines):
            wide = 30 + 7.0 * len(line.label)
            x, top = (x, top) if x + wide < RIGHT else (float(LEFT), top + ROW)
            body.append(f'<path class="line c{at}" d="M{x:g} {top + 6:g}h18"/>')
            body.append(_text(x + 24, top + 10.5, line.label))
            x += wide + 8
        top += ROW + 8
    return _svg(body, top + 4)


def _panel(title: str, lines: Sequence[Line], top: float, *, from_zero: bool) -> Iterator[str]:
    """Yield the title, axes, bands and lines of one panel."""
    low = 0.0 if from_zero else min(min(line.low) for line in lines)
    high, end = max(max(line.high) for line in lines), max(line.steps[-1] for line in lines)
    top += HEAD
    high += 0.04 * (high - low)

    def x(step: float) -> float:
        return LEFT + step / end * (RIGHT - LEFT)

    def y(value: float) -> float:
        return top + PANEL - (value - low) / (high - low) * PANEL

    yield _text(LEFT, top - 10, title, "title")
    for value in ticks(low, high, 6):
        yield f'<path class="grid" d="M{LEFT} {y(value):.1f}H{RIGHT}"/>'
        yield _text(LEFT - 7, y(value) + 4, f"{value:,.4g}", "soft end")
    for value in ticks(0.0, end, 4):
        yield _text(x(value), top + PANEL + 18, short(value), "soft middle")
    for at, line in enumerate(lines):
        if line.low != line.high:
            there = [f"{x(s):.1f} {y(v):.1f}" for s, v in zip(line.steps, line.high, strict=True)]
            back = [f"{x(s):.1f} {y(v):.1f}" for s, v in zip(line.steps, line.low, strict=True)]
            yield f'<path class="band c{at}" d="M{"L".join(there + back[::-1])}Z"/>'
        for step in line.marks:
            yield f'<path class="mark" d="M{x(step):.1f} {top}v{PANEL}"/>'
        points = [f"{x(s):.1f} {y(v):.1f}" for s, v in zip(line.steps, line.mean, strict=True)]
        yield f'<path class="line c{at}" d="M{"L".join(points)}"/>'


def races(data: Sequence[dict[str, Any]]) -> str:
    """Return how many times as long as SteadyRL the others take, the longest first."""
    times = {(each["preset"], each["contestant"]): each["seconds"] for each in data}
    ratio = {(e["preset"], e["contestant"]): float(e["against ours"].rstrip("x")) for e in data}
    longest = {
        preset: max(r for (of, _), r in ratio.items() if of == preset) for preset, _ in ratio
    }
    scale = (RIGHT - NAMES - 130) / max(ratio.values())
    body, top = (
        [_text(12, 20, "seconds to a trained policy; bars: in proportion to SteadyRL", "soft")],
        36.0,
    )
    for preset in sorted(longest, key=lambda name: -longest[name]):
        body.append(_text(NAMES - 8, top + 13, preset, "end"))
        for at, name in enumerate(CONTESTANTS):
            if (preset, name) in times:
                wide, says = scale * ratio[preset, name], f"{times[preset, name]:,.1f} s"
                says += f", {ratio[preset, name]:.1f} times" if at else ""
                body.append(_bar(at, NAMES, top, wide, 16))
                body.append(_text(NAMES + wide + 6, top + 13, says, "soft"))
                top += 19
        top += 9
    for at, name in enumerate(CONTESTANTS):
        body.append(_bar(at, NAMES + 145 * at - 25 * (at > 0), top + 2, 12, 12))
        body.append(_text(NAMES + 145 * at - 25 * (at > 0) + 17, top + 12.5, name))
    return _svg(body, top + 26)


def _bar(colour: int, x: float, y: float, width: float, height: float) -> str:
    shape = f'x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height}" rx="2"'
    return f'<rect class="bar c{colour}" {shape}/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(body: Sequence[str], height: float) -> str:
    lines = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}"'
        f' width="{WIDTH}">\n<style>{STYLE}</style>\n'
        f'<rect class="back" width="100%" height="100%" rx="6"/>\n{lines}\n</svg>\n'
    )


def pictures() -> dict[str, str]:
    """Return every chart by the name of its file."""
    data = read(CURVES)
    drawn = {name: curves(name, data) for name in CHARTS if any(e["chart"] == name for e in data)}
    return drawn | {"races": races(read(RACE))}


def added(chart: str, panel: str, line: str, command: str, run: Path) -> str:
    """Return a run's line of docs/data/curves.jsonl, its evaluations when they were due."""
    tag, config = CHARTS[chart].tag, OmegaConf.load(run / "config.yaml")
    due = config.eval.every if tag.startswith("eval/") else 1
    logged = [e for e in read(run / "metrics.jsonl") if tag in e]
    every = -(-len(logged) // MOST_POINTS)
    logged = [*logged[:-1:every], logged[-1]]
    revision = ["git", "-C", str(DOCS), "rev-parse", "--short", "HEAD"]
    measured = {
        "processor": processor(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.run(revision, capture_output=True, text=True).stdout.strip(),
        "versions": {name: version(name) for name in ("torch", "numba")},
        "command": f"{command} seed={config.seed}",
    }
    steps = [round(each["step"] / due) * due for each in logged]
    curve = {"steps": steps, "values": [round(each[tag], 1) for each in logged]}
    names = {"chart": chart, "panel": panel, "line": line, "seed": config.seed}
    resumed = re.findall(r"resumed from step ([\d,]+)", (run / "train.log").read_text())
    if resumed:
        curve["resumed"] = [int(step.replace(",", "")) for step in resumed]
    return json.dumps(names | curve | {"measured": measured})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--add"]:
        *what, command = sys.argv[2:6]
        with CURVES.open("a") as file:
            file.writelines(f"{added(*what, command, Path(run))}\n" for run in sys.argv[6:])
    for name, text in pictures().items():
        path = DOCS / f"{name}.svg"
        if sys.argv[1:] != ["--check"]:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{path} is not up to date: run python docs/pictures.py")
