"""Overrides typed for a resumed run, merged into its stored configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from steadyrl.core.errors import SettingError
from steadyrl.training.config.schema import show

# What may be another in the continued run: it decides when and where, and how numbers are rounded,
# not what is learned; whatever is saved is float32.
MUTABLE_KEYS = (
    *("total_steps", "device", "precision", "deterministic", "threads"),
    *("stop_timeout", "agent.compile", "env.step_timeout", "env.max_restarts"),
)

MUTABLE_GROUPS = ("eval.", "log.", "checkpoint.", "memory.")

# What names the run rather than being part of it.
ABOUT_THE_RUN = ("resume", "run_dir", "init_from")

AUTO = "auto"


class Continued(NamedTuple):
    """The configuration of a continued run, and what is another in it than before."""

    config: dict[str, Any]
    changes: tuple[str, ...]  # such as "total_steps=200000 (was 100000)"


def merge_overrides(
    stored: Mapping[str, Any], fresh: Mapping[str, Any], typed: Sequence[str]
) -> Continued:
    """Return the stored configuration with the changes somebody typed.

    `fresh` is what the command line alone would give; of it only what `typed` (its overrides)
    names is looked at. What would change the meaning of saved state is refused.
    """
    config = deepcopy(dict(stored))
    before, after = dict(flatten(stored)), dict(flatten(fresh))
    changes = []
    for key in sorted(overridden_keys(typed, list(after))):
        if key in ABOUT_THE_RUN or (key in before and before[key] == after[key]):
            continue
        was = f"it was {show(before[key])}" if key in before else "it was not set"
        if not is_free(key):
            raise SettingError(
                key,
                show(after[key]),
                f"cannot change when a run is continued ({was}): what the run has learned and "
                "kept depends on it; start a new run, from this one's policy with init_from=…",
            )
        set_key(config, key, after[key])
        changes.append(f"{key}={show(after[key])} ({was.removeprefix('it ')})")
    return Continued(config, tuple(changes))


def is_free(key: str) -> bool:
    """Tell whether a key may change when a run is continued."""
    return key in MUTABLE_KEYS or key.startswith(MUTABLE_GROUPS)


def flatten(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every full key with its value; an empty group is a value."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def overridden_keys(typed: Sequence[str], keys: Sequence[str]) -> set[str]:
    """Return the keys that overrides are about: themselves, or all of a group or a preset."""
    found: set[str] = set()
    for override in typed:
        name = override.partition("=")[0].lstrip("+~").partition("@")[0].replace("/", ".")
        if name == "experiment":
            return set(keys)
        found |= {key for key in keys if key == name or key.startswith(f"{name}.")}
    return found


def set_key(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a full key."""
    *groups, name = key.split(".")
    for group in groups:
        config = config.setdefault(group, {})
    config[name] = value
