"""The keys of runs whose values differ from the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from steadyrl.core.errors import one_line, show
from steadyrl.training.analysis.groups import AGENT
from steadyrl.training.analysis.past_runs import PastRun
from steadyrl.training.config.overrides import ABOUT_THE_RUN, flatten
from steadyrl.training.config.settings import defaults_for

MOST_VALUES = 8
LEFT_OUT = {"seed", "seeds", *ABOUT_THE_RUN} - {"init_from"}  # shown elsewhere


class Difference(NamedTuple):
    """A key, its values in the runs, and its default, as written on the command line."""

    key: str
    values: str
    default: str


def differing(runs: Sequence[PastRun]) -> Iterator[Difference]:
    """Yield every key with a value that is not its run's default."""
    agents = {str(run.config.get(AGENT)) for run in runs}
    defaults = {agent: dict(flatten(defaults_for(agent))) for agent in sorted(agents)}
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for run in runs:
        own = defaults[str(run.config.get(AGENT))]
        for key, value in run.config.items():
            shown = str(show(value, whole=True))
            default = str(show(own[key], whole=True)) if key in own else "–"
            values, known = found.setdefault(key, ({}, {}))
            values[shown], known[default] = None, None
    for key, (values, known) in sorted(found.items()):
        if key not in LEFT_OUT and values.keys() != known.keys():
            yield Difference(one_line(key), _few(list(values)), _few(list(known)))


def _few(values: Sequence[str]) -> str:
    return one_line(", ".join(values[:MOST_VALUES]) + ("…" if len(values) > MOST_VALUES else ""))
