"""Groups of runs compared: score, P(better), steps and time to a threshold, speed and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from steadyrl.core.errors import SettingError
from steadyrl.envs.registration import find_spec, imports_module
from steadyrl.training.analysis.estimates import (
    Array,
    interval,
    mean,
    probability_of_improvement,
)
from steadyrl.training.analysis.groups import SCORES, Group, end_of_unfinished, notes
from steadyrl.training.analysis.measures import peak, score, score_tags, speed
from steadyrl.training.analysis.normalised import Normaliser, iqm
from steadyrl.training.analysis.past_runs import NoRunError, PastRun


class Row(NamedTuple):
    """The measures of one group; None if unknown, as is the interval of a single run.

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


NORMALISED = ("normalised", "normalised_low", "normalised_high")


def _reached(run: PastRun, tag: str, threshold: float) -> tuple[float, float]:
    """Return step and seconds of the first score at the threshold; inf if it is never reached."""
    for step, value in run.metrics[tag].items():
        if value >= threshold:
            return step, run.seconds.get(step, math.nan)
    return math.inf, math.inf


def _scores(group: Group, tag: str) -> Array:
    """Return the scores of a group's runs."""
    return np.array([score(run, tag) for run in group.runs], float)


def _compare(
    group: Group,
    first: Group,
    tag: str,
    threshold: float | None,
    normalise: Normaliser | None,
) -> Row:
    """Return a group's row, compared with the group `first`; all runs have the `tag`."""
    scores, theirs = _scores(group, tag), _scores(first, tag)
    row = Row(group.env, group.name, len(group.runs), float(mean(scores)))
    if len(scores) > 1:
        low, high = interval(scores, mean)
        row = row._replace(score_low=float(low), score_high=float(high))
    if normalise is not None:
        known = [each for each in (row.score, row.score_low, row.score_high) if each is not None]
        normalised = normalise(group.env, np.array(known)).tolist()
        row = row._replace(**dict(zip(NORMALISED, normalised, strict=False)))
    if group is not first:
        probability, (least, most) = probability_of_improvement(scores, theirs)
        row = row._replace(better=probability)
        if len(scores) > 1 or len(theirs) > 1:
            row = row._replace(better_low=float(least), better_high=float(most))
    if threshold is not None:
        reaches = np.array([_reached(run, tag, threshold) for run in group.runs])  # [R, 2]
        steps, seconds = np.median(reaches, axis=0).tolist()
        solved = int(np.isfinite(reaches[:, 0]).sum())
        row = row._replace(threshold=threshold, solved=solved)
        row = row._replace(steps=_finite(steps), seconds=_finite(seconds))
    speeds = [each for run in group.runs if (each := speed(run)) is not None]
    peaks = [each for run in group.runs if (each := peak(run)) is not None]
    fast = float(np.mean(speeds)) if speeds else None
    return row._replace(steps_per_second=fast, memory_mb=max(peaks, default=None))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _over_games(
    scored: Sequence[Group],
    tags: Mapping[str, str],
    normalise: Normaliser,
    say: Callable[[str], None],
) -> list[Row]:
    """Return the interquartile mean of each group's runs over all games."""
    found: dict[str, dict[str, list[Array]]] = {}  # by group and game, which may have several ids
    for group in scored:
        scores = normalise(group.env, _scores(group, tags[group.env]))
        found.setdefault(group.name, {}).setdefault(normalise.game(group.env), []).append(scores)
    rows = []
    for name, of_game in found.items():
        games = [np.concatenate(scores) for scores in of_game.values()]
        lacks = {game for each in found.values() for game in each} - of_game.keys()
        if lacks:
            missing = ", ".join(sorted(lacks))
            say(f"{name}: the interquartile mean is without {missing}, which others have")
        few, many = min(map(len, games)), max(map(len, games))
        if few < many:
            say(f"{name}: games have {few} to {many} runs, and those of more count for more")
        centre, (low, high) = iqm(games)
        runs = sum(map(len, games))
        title = f"interquartile mean of {len(games)} game{'' if len(games) == 1 else 's'}"
        row = Row(title, name, runs, normalised=centre)
        if runs > len(games):
            row = row._replace(normalised_low=float(low), normalised_high=float(high))
        rows.append(row)
    return sorted(rows, key=lambda row: row.env)


def compare_groups(
    found: Sequence[Group],
    threshold: float | None,
    say: Callable[[str], None],
    normalise: Normaliser | None,
) -> list[Row]:
    """Return a row for each group, by environment; pass notes on runs that are left out to `say`.

    `threshold` None: the environment's own.
    """
    tags = score_tags(found)
    scored = _with_scores(found, tags, say)
    envs = list(dict.fromkeys(group.env for group in scored))
    rows = []
    for env in envs:
        of_env = [group for group in scored if group.env == env]
        if tags[env] != SCORES[0]:
            say(f"{env}: no run has evaluations; scores are returns of training")
        solved_at = _reward_threshold(env) if threshold is None else threshold
        rows += [_compare(each, of_env[0], tags[env], solved_at, normalise) for each in of_env]
    if normalise is not None and len(set(map(normalise.game, envs))) > 1:
        rows += _over_games(scored, tags, normalise, say)
    return rows


def _with_scores(
    found: Sequence[Group], tags: Mapping[str, str], say: Callable[[str], None]
) -> list[Group]:
    """Return the groups with their runs that have scores; NoRunError if none has."""
    scored: list[Group] = []
    left_out: list[tuple[str, str]] = []  # a run, and why
    for group in found:
        for note in notes(group):
            say(f"{group.name}: {note}")
        runs = []
        for run in group.runs:
            unfinished = end_of_unfinished(run)
            if score(run, tags[group.env]) is None:
                returned = SCORES[1] in run.metrics
                lacks = ", which other runs have" if returned else " and no returns"
                end = f" ({unfinished})" if unfinished else ""
                left_out.append((f"{group.name}: {run.path}", f"no evaluations{lacks}{end}"))
                continue
            runs.append(run)
            if unfinished:
                say(f"{group.name}: {run.path.name} did not finish: {unfinished}")
        if runs:
            scored.append(group._replace(runs=runs))
    if not scored:
        raise NoRunError(f"{left_out[0][0]} has no evaluations and no returns, like all runs given")
    for run_name, why in left_out:
        say(f"{run_name} is left out: {why}")
    return scored


def _reward_threshold(env: str) -> float | None:
    """Return the environment's reward threshold; None if it has none."""
    if imports_module(env):  # user code, which need not be imported for a table
        return None
    try:
        return find_spec(env).reward_threshold
    except SettingError:  # the package is not installed
        return None
