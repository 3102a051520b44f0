"""The charts of one environment's groups, in the order of TensorBoard's Custom Scalars page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from steadyrl.training.analysis.curves import Curve, curve_of
from steadyrl.training.analysis.groups import SCORES, Group
from steadyrl.training.evaluation.t_distribution import t_quantile
from steadyrl.training.logging.charts import CHARTS
from steadyrl.training.report.chart import MOST_LINES, Line, chart

EVALUATED, SPREAD = SCORES[0], "eval/return_std"
SCORE, OTHERS = "score", "others"
TOGETHER = ("score", "memory")  # categories whose tags have one unit, so one chart, for one group
FROM_ZERO = ("speed", "memory")  # categories whose y axes include 0
MOST_POINTS = 400  # of a line: as many as a chart has pixels
PAGE_POINTS = 24_000  # of all lines together: some 40 bytes each


class Panel(NamedTuple):
    """A chart to draw: its category, title and tags."""

    category: str
    title: str
    tags: list[str]


def charts(groups: Sequence[Group]) -> str:
    """Return the section of one environment: all its charts, the scores first."""
    panels = list(_panels({t for g in groups for run in g.runs for t in run.metrics}, len(groups)))
    title = f"<h2>Learning curves{f': {escape(groups[0].env)}' if groups[0].env else ''}</h2>"
    if not panels:
        return f"{title}<p>No metrics were logged.</p>"
    lines = sum(len(panel.tags) for panel in panels) * min(len(groups), MOST_LINES)
    points = max(8, min(MOST_POINTS, PAGE_POINTS // lines))
    parts = [title, f"<p>{_explained(groups)}</p>"]
    for category in dict.fromkeys(panel.category for panel in panels):
        drawn = [_drawn(panel, groups, points) for panel in panels if panel.category == category]
        grid = f"<div class=charts>{''.join(drawn)}</div>"
        if category == OTHERS:
            grid = f"<details><summary>{len(drawn)} more metrics</summary>{grid}</details>"
        parts += [f"<h3>{category}</h3>" if category not in (SCORE, OTHERS) else "", grid]
    return "".join(parts)


def _explained(groups: Sequence[Group]) -> str:
    many = max(len(group.runs) for group in groups) > 1
    over = "seeds" if many else f"the episodes of an evaluation ({SPREAD})"
    mean = "Means over seeds; " if many else ""
    return f"{mean}x: environment steps; bands: 95 % intervals of the mean over {over}."


def _panels(tags: set[str], groups: int) -> Iterator[Panel]:
    """Yield the charts: of one group with related tags together, of several with one tag each."""
    left = sorted(tags - {SPREAD})
    for category, titles in CHARTS.items():
        for title, patterns in titles.items():
            found = [tag for p in patterns for tag in left if re.fullmatch(p, tag)]
            left = [tag for tag in left if tag not in found]
            if found and category in TOGETHER and groups == 1:
                yield Panel(category, title, found)
            else:
                yield from (Panel(category, tag, [tag]) for tag in found)
    yield from (Panel(OTHERS, tag, [tag]) for tag in left)


def _drawn(panel: Panel, groups: Sequence[Group], points: int) -> str:
    found = [(tag, group, _curve(group, tag)) for tag in panel.tags for group in groups]
    lines = [
        Line(tag if len(groups) == 1 else group.name, curve, index)
        for index, (tag, group, curve) in enumerate(found)
        if curve is not None
    ]
    return chart(panel.title, lines, points=points, from_zero=panel.category in FROM_ZERO)


def _curve(group: Group, tag: str) -> Curve | None:
    """Return a group's curve; of one run's evaluations with the interval over episodes."""
    with np.errstate(over="ignore", invalid="ignore"):
        curve = curve_of(group, tag, "steps")
    if curve is None or tag != EVALUATED or len(group.runs) > 1:
        return curve
    run = group.runs[0]
    episodes = run.config.get("eval.episodes")
    if not isinstance(episodes, int) or episodes < 2:
        return curve
    spread = run.metrics.get(SPREAD, {})
    std = np.array([spread.get(step, 0.0) for step in run.metrics[tag]])
    half = t_quantile(episodes - 1) * std / math.sqrt(episodes - 1)
    return curve._replace(low=curve.centre - half, high=curve.centre + half)
