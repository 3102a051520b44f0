"""Write the report of runs as one HTML page: SVG charts, no scripts, nothing from the network.

The same runs give the same bytes. All text that comes from files is escaped.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from html import escape
from pathlib import Path

import numpy as np

from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import one_line, printable
from steadyrl.core.safe_parsing import read_yaml
from steadyrl.training.analysis.estimates import interval, mean
from steadyrl.training.analysis.groups import (
    AGENT,
    SCORES,
    Group,
    distinct_seeds,
    names,
    notes,
)
from steadyrl.training.analysis.measures import peak, score, score_tags, speed
from steadyrl.training.analysis.past_runs import PastRun
from steadyrl.training.config.overrides import preset_options
from steadyrl.training.evaluation.t_distribution import t_quantile
from steadyrl.training.logging.terminal import score as shown
from steadyrl.training.report.curves import charts
from steadyrl.training.report.differences import differing
from steadyrl.training.report.endings import Ending, ending
from steadyrl.training.report.films import films
from steadyrl.training.report.style import STYLE

MOST_ROWS = 300  # of a table
EVALUATIONS, RETURNS = SCORES
LONGEST = 1e9  # seconds
LINES = 500  # of a run's metrics that are read: more than a chart has pixels for
# Nothing may be loaded, whatever the runs' files contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"


def page(groups: Sequence[Group], left_out: Sequence[str], place: Path) -> str:
    """Return the report of groups of runs, as a page in the directory `place`."""
    runs = [run for group in groups for run in group.runs]
    title = escape(_title(groups))
    seeds, repeats = distinct_seeds(groups)
    body = [f"<h1>{title}</h1>", _subtitle(runs), _endings(groups), _evaluations(seeds)]
    body += [charts([g for g in seeds if g.env == env]) for env in _envs(groups)]
    body += [films(runs, place), _differences(runs), _notes(groups, [*left_out, *repeats])]
    head = (
        f'<meta charset=utf-8><meta http-equiv=Content-Security-Policy content="{POLICY}">'
        "<meta name=viewport content='width=device-width'><meta name=color-scheme "
        f"content='light dark'><title>{title}</title><style>{STYLE}</style>"
    )
    text = f"<!doctype html><html lang=en>{head}<main>{''.join(body)}</main></html>\n"
    return text.encode(errors="replace").decode()  # names of files need not be Unicode


def _title(groups: Sequence[Group]) -> str:
    agents = {str(run.config.get(AGENT, "")).upper() for group in groups for run in group.runs}
    parts = [_few(sorted(agents - {""})), _few(_envs(groups))]
    return one_line(" on ".join(part for part in parts if part)) or "Runs"


def _few(texts: Sequence[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def _envs(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(group.env for group in groups))


def _subtitle(runs: Sequence[PastRun]) -> str:
    if len(runs) > 1:
        return f"<p>{len(runs)} runs</p>"
    command = _command(runs[0])
    return f"<p>{_code(str(runs[0].path))}</p>" + (f"<p>{_code(command)}</p>" if command else "")


def _command(run: PastRun) -> str:
    """Return the command line that began a run; "" if unknown."""
    place = run.path / ".hydra"
    options: list[str] = []
    try:  # files that anyone may have written: parsers raise what they like
        typed = read_yaml(place / "overrides.yaml")
        with suppress(FileNotFoundError):
            sources = read_yaml(place / "hydra.yaml")["hydra"]["runtime"]["config_sources"]
            options = preset_options(sources)
    except Exception:
        return ""
    if not isinstance(typed, list):
        return ""
    return " ".join([command_of(), *(shlex.quote(str(each)) for each in [*options, *typed])])


def _endings(groups: Sequence[Group]) -> str:
    """Return how the runs ended, and what to do next."""
    rows, remarks = [], []
    found = [(group, name, run) for group in groups for name, run in _named(group)]
    for group, name, run in found[:MOST_ROWS]:
        end = ending(run)
        row = {"group": escape(group.name)} if len(groups) > 1 else {}
        rows.append(
            row
            | {
                "run": escape(name),
                "seed": escape(str(run.config.get("seed", run.summary.get("seed", "")))),
                "status": f"<span class='pill {_kind(end)}'>{escape(end.status)}</span>",
                "steps": _whole(_steps(run)),
                "return": _number(_or_logged(run, "return_mean", RETURNS)),
                "evaluation": _evaluation(run),
                "best": _number(_of_summary(run, "best_eval_return_mean")),
                "steps/s": _whole(speed(run)),
                "time": _seconds(run),
                "peak MB": _whole(peak(run)),
            }
        )
        remarks.append(_remark(name, end, alone=len(found) == 1))
    return f"<h2>How it ended</h2>{_table(rows, len(found))}{''.join(remarks)}"


def _named(group: Group) -> list[tuple[str, PastRun]]:
    return list(zip(names(group.runs), group.runs, strict=True))


def _kind(end: Ending) -> str:
    return {"finished": "good", "running": "calm", "interrupted": "calm"}.get(end.status, "bad")


def _remark(name: str, end: Ending, *, alone: bool) -> str:
    """Return reason, exit code, warnings and next commands; of many runs only what needs care."""
    if not alone and _kind(end) == "good":
        return ""
    parts = [f"<b>{escape(end.status if alone else f'{name}: {end.status}')}</b>"]
    parts += [f"exit code {escape(end.exit_code)}"] if end.exit_code else []
    parts += [escape(end.reason)] if end.reason else []
    lines = [f"<p>{' · '.join(parts)}</p>"]
    if end.warnings:
        lines.append(_list(f"<span class=warn>warning</span> {escape(w)}" for w in end.warnings))
    steps = end.following if alone else end.following[:1]
    lines.append(_list(f"{escape(step.what)}: {_code(step.command)}" for step in steps))
    return f"<div class=remark>{''.join(lines)}</div>"


def _evaluations(groups: Sequence[Group]) -> str:
    """Return the score of each group of several runs, with its interval over seeds."""
    rows, tags = [], score_tags(groups)
    for group in groups:
        found = (score(run, tags[group.env]) for run in group.runs)
        scores = np.array([value for value in found if value is not None])
        if len(group.runs) > 1 and len(scores):
            with np.errstate(over="ignore", invalid="ignore"):
                low, high = interval(scores, mean)
            bounds = f"[{_number(float(low))}, {_number(float(high))}]" if len(scores) > 1 else ""
            rows.append(
                {
                    "group": escape(group.name),
                    "environment": escape(group.env),
                    "seeds": str(len(scores)),
                    "final return": _number(scores.mean()),
                    "95 % interval": bounds,
                    "lowest … highest": f"{_number(scores.min())} … {_number(scores.max())}",
                }
            )
    if not rows:
        return ""
    text = "Mean of the seeds' last evaluations (without any: of their training returns)"
    text += ", with its bootstrap interval."
    return f"<h2>Over seeds</h2><p>{text}</p>{_table(rows[:MOST_ROWS], len(rows))}"


def _evaluation(run: PastRun) -> str:
    """Return the last evaluation's mean, with Student's interval over its episodes."""
    value = _or_logged(run, "eval_return_mean", EVALUATIONS)
    std, episodes = (_of_summary(run, f"eval_{name}") for name in ("return_std", "episodes"))
    if value is None or std is None or episodes is None or episodes < 2:
        return _number(value)
    half = t_quantile(int(episodes) - 1) * std / math.sqrt(int(episodes) - 1)
    return f"{_number(value)} <small>[{_number(value - half)}, {_number(value + half)}]</small>"


def _differences(runs: Sequence[PastRun]) -> str:
    rows = [
        {"key": _code(each.key), "value": _code(each.values), "default": _code(each.default)}
        for each in differing(runs)
    ]
    if not rows:
        return ""
    table = _table(rows[:MOST_ROWS], len(rows), "text")
    return f"<h2>Configuration</h2><p>What differs from the defaults.</p>{table}"


def _notes(groups: Sequence[Group], left_out: Sequence[str]) -> str:
    lines = [*left_out, *(f"{group.name}: {line}" for group in groups for line in notes(group))]
    if not lines:
        return ""
    return f"<h2>Notes</h2>{_list(escape(one_line(line)) for line in lines[:MOST_ROWS])}"


def _steps(run: PastRun) -> float:
    steps = _of_summary(run, "steps")
    logged = max((max(series) for series in run.metrics.values()), default=0)
    return logged if steps is None else steps


def _seconds(run: PastRun) -> str:
    whole = _of_summary(run, "wall_seconds")
    whole = max(run.seconds.values(), default=None) if whole is None else whole
    return "" if whole is None else str(timedelta(seconds=round(min(max(whole, 0), LONGEST))))


def _or_logged(run: PastRun, key: str, tag: str) -> float | None:
    """Return a number of a run's summary; without it, as of a killed run, the last one logged."""
    value = _of_summary(run, key)
    return score(run, tag) if value is None else value


def _of_summary(run: PastRun, key: str) -> float | None:
    """Return a finite number of a run's summary; None if it has none."""
    value = run.summary.get(key)
    if isinstance(value, bool) or not isinstance(value, float | int):
        return None
    with suppress(OverflowError):  # an integer may be too large
        return float(value) if math.isfinite(value) else None
    return None


def _number(value: float | None) -> str:
    return "" if value is None else shown(value)


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _code(text: str) -> str:
    return f"<code>{escape(printable(text))}</code>" if text else ""


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _table(rows: Sequence[Mapping[str, str]], count: int, kind: str = "") -> str:
    """Return a table of cells by heading; `count`: its rows if all were shown."""
    cells = "".join(f"<th>{name}" for name in rows[0])
    lines = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row.values())}" for row in rows)
    more = f"<p>… and {count - len(rows):,} more</p>" if count > len(rows) else ""
    return f"<div class=wide><table class='{kind}'><tr>{cells}{lines}</table></div>{more}"
