"""Configuration, metrics and summary of a run, for notebooks (`steadyrl.read`)."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.errors import SettingError, nearest, validate_path
from steadyrl.training.analysis.past_runs import NoRunError, find_runs, read_run

if TYPE_CHECKING:
    import pandas

Value = TypeVar("Value")


class FlatKeys(dict[str, Value]):
    """A mapping by full key; the error for another key names the nearest."""

    def __missing__(self, key: object) -> NoReturn:
        inside = [k for k in self if k.startswith(f"{key}.") or k.endswith((f".{key}", f"/{key}"))]
        first = f"keys are flat, such as {', '.join(inside[:3])}" if inside else ""
        raise KeyError(f"{key}: no such key; {first or nearest(str(key), self)}")


class RunData(NamedTuple):
    """A run, finished or not."""

    directory: Path
    config: Mapping[str, Any]  # by full key, such as "agent.learning_rate"
    metrics: Mapping[str, NDArray[np.float64]]  # {tag: [L]}, also "step" and "wall_seconds"
    summary: Mapping[str, Any]  # empty until the run has ended
    is_running: bool

    def frame(self) -> pandas.DataFrame:
        """Return the metrics as a pandas DataFrame, indexed by step."""
        try:
            import pandas
        except ImportError:
            reason = "needs pandas, install it with: pip install pandas"
            raise SettingError("frame", "()", reason) from None
        return pandas.DataFrame(dict(self.metrics)).set_index("step")


def read_run_data(path: str | PathLike[str]) -> RunData:
    """Read a run's directory; a metric that was not logged at a step is NaN there."""
    validate_path("run", path)
    runs, _ = find_runs(fspath(path))
    if len(runs) > 1:
        raise NoRunError(f"{fspath(path)}: holds {len(runs)} runs, such as {runs[0]}; name one")
    run = read_run(runs[0], None)
    steps = sorted({*run.seconds, *(step for series in run.metrics.values() for step in series)})
    columns = {"wall_seconds": run.seconds, **run.metrics}
    metrics = FlatKeys(
        {"step": np.array(steps, np.float64)}
        | {
            tag: np.array([series.get(step, np.nan) for step in steps], np.float64)
            for tag, series in columns.items()
        }
    )
    return RunData(run.path, FlatKeys(run.config), metrics, run.summary, run.is_running)
