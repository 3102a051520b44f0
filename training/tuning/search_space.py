"""Search spaces: configuration keys and their ranges, read from YAML and checked."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import ExpectedError, SettingError, describe, nearest, show
from steadyrl.core.safe_parsing import read_yaml
from steadyrl.training.config.hints.explain import explain
from steadyrl.training.config.overrides import as_override, flatten
from steadyrl.training.config.settings import Job
from steadyrl.training.run.job import accept, compose_one
from steadyrl.training.sweeps.subprocess_run import quoted

KINDS = {
    int: "an integer", float: "a number", str: "text", list: "a list", dict: "keys with values",
}  # fmt: skip


class StudyError(ExpectedError):
    """Invalid description of a search: which key, and what is wrong."""

    exit_code = 2


class Range(NamedTuple):
    """Values of a key: a list of choices, or an interval."""

    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that are validated before the search: all choices, or both ends."""
        return self.choices or (self.low, self.high)


EXAMPLES = Path(__file__).parent  # study.yaml and population.yaml, which come with the package


def validate_given(path: Path | None, program: str, example: str) -> Path:
    """Return the file of a command; without one, say how to copy the example."""
    if path is not None and path.exists():
        return path
    wrong = "name a file" if path is None else f"{path}: no such file"
    copy = path or Path(example)
    raise StudyError(f"{wrong}; copy the example, edit it and start it:").with_details(
        shlex.join(["cp", str(EXAMPLES / example), str(copy)]),
        f"{command_of(program)} {shlex.quote(str(copy))}",
    )


def read_study(path: Path, keys: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return a YAML file's values, with the defaults in `keys`; default ... means required.

    Values must have the type in `kinds`, or else that of their default.
    """
    try:
        found = read_yaml(path, resolve=True, follow=True)
    except Exception as error:  # disk or parser
        raise StudyError(f"{path}: cannot be read: {describe(error)}") from None
    if not isinstance(found, dict):
        raise StudyError(f"{path}: is no mapping of keys")
    for key in map(str, found):
        if key not in keys:
            raise StudyError(f"{path}: {key}: no such key; {nearest(key, keys)}")
    values: dict[str, Any] = {}
    for key, default in keys.items():
        if default is ... and key not in found:
            raise StudyError(f"{path}: {key} is missing")
        value = found.get(key, default)
        if value is not None or default is not None:
            value = _of_kind(f"{path}: {key}", kinds.get(key, type(default)), value)
        values[key] = value
    return values


def _of_kind(where: str, kind: type, value: Any) -> Any:
    """Return a value converted to `kind`; a quoted number is text."""
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = isinstance(value, kind) or (kind is float and number)
    if not fits or (kind is int and not number):
        quotes = " without quotes" if kind in (int, float) and isinstance(value, str) else ""
        raise StudyError(f"{where}={show(value)}: must be {KINDS[kind]}{quotes}")
    if kind is int and value < 0:
        raise StudyError(f"{where}={value}: must be 0 or more")
    return value


def read_name(path: Path, name: str) -> str:
    """Return the name of a search; raise StudyError if it is no valid file name."""
    if not name.replace("_", "").replace("-", "").isalnum():
        raise StudyError(f"{path}: name={name}: letters, digits, - and _ only")
    return name


def read_folder(path: Path, folder: str | None, default: Path) -> Path:
    """Return the folder of a search; raise StudyError if it cannot be written."""
    place = Path(os.path.abspath(Path(folder or default).expanduser()))
    found = next(each for each in (place, *place.parents) if os.path.lexists(each))
    if not found.is_dir():
        raise StudyError(f"{path}: folder={place}: {found} is a file; choose another folder")
    if not os.access(found, os.W_OK | os.X_OK):
        reason = "cannot be written to; name another place with folder:"
        raise StudyError(f"{path}: folder={place}: {found} {reason}")
    return place


@contextmanager
def folder_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the disk under a search's folder to one line."""
    try:
        yield
    except OSError as error:
        reason = f"{describe(error)}; the same command resumes once this is mended"
        raise StudyError(f"folder={folder}: {reason}") from None


def read_space(path: Path, values: Any) -> dict[str, Range]:
    """Return the ranges of a search space: a list of choices, or low, high and log."""
    if not isinstance(values, dict) or not values:
        raise StudyError(f"{path}: space: needs keys with their ranges")
    return {str(key): _range(f"{path}: space.{key}", value) for key, value in values.items()}


def _range(where: str, value: Any) -> Range:
    if isinstance(value, list) and value:
        return Range(tuple(value))
    if not isinstance(value, dict) or not {"low", "high"} <= set(value) <= {"low", "high", "log"}:
        raise StudyError(f"{where}: write [a, b, …] or {{low: …, high: …, log: true}}")
    try:
        low, high = (v if isinstance(v, int) else float(v) for v in (value["low"], value["high"]))
    except (TypeError, ValueError):
        raise StudyError(f"{where}: low and high are numbers") from None
    log = value.get("log", False)
    if not isinstance(log, bool):
        raise StudyError(f"{where}: log={show(log)}: must be true or false")
    if not (math.isfinite(low) and math.isfinite(high)) or low >= high:
        raise StudyError(f"{where}: low={show(low)} must be below high={show(high)}")
    if log and low <= 0:
        raise StudyError(f"{where}: low={show(low)} must be above 0 where log is true")
    return Range(low=low, high=high, log=log)


def typed(key: str, value: Any) -> str:
    """Return `key=value` as on the command line."""
    if isinstance(value, str):
        return f"{key}={quoted(value)}"
    short, whole = f"{key}={show(value)}", as_override(key, value)
    return short if short == whole.replace(", ", ",") else whole


def job_of(overrides: Sequence[str], folder: Path) -> Job:
    """Return the job of these overrides with run directory `folder`, or raise StudyError."""
    given = list(overrides)
    try:
        config = compose_one(given)
    except Exception as error:  # Hydra or OmegaConf
        raise StudyError(explain(error, given, multirun=False)) from error
    # The default run directory is not created.
    config.run_dir, config.resume = str(folder), None
    if config.checkpoint.mirror is not None:
        raise StudyError("checkpoint.mirror: a search is many runs, and a URL holds one")
    return accept(config)


def check_space(
    overrides: Sequence[str], space: Mapping[str, Range], folder: Path
) -> tuple[Job, dict[str, Range]]:
    """Check each range at its ends; return the job of the overrides alone, and the ranges.

    Their ends are integers where the key is: 1e2 of a YAML file is none.
    """
    job, found = job_of(overrides, folder), dict(space)
    for key, allowed in space.items():
        for value in allowed.ends:
            try:
                at_end = job_of([*overrides, typed(key, value)], folder)
                found[key] = _of_type(allowed, dict(flatten(at_end.settings.values())).get(key))
            except SettingError as error:  # invalid value: report this key
                if error.field != key:  # an error in another key, which may be searched too
                    continue
                raise StudyError(f"space.{key}: {error}") from None
            except ExpectedError as error:
                raise StudyError(f"space.{key}: {error}") from None
    return job, found


def _of_type(allowed: Range, value: Any) -> Range:
    """Return a range for a key of the type of `value`."""
    if not allowed.choices and isinstance(value, int) and not allowed.whole:
        return allowed._replace(low=int(allowed.low), high=int(allowed.high))
    if not allowed.choices and isinstance(value, float) and allowed.whole:
        return allowed._replace(low=float(allowed.low), high=float(allowed.high))
    return allowed
