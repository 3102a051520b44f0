"""Merge the overrides of a resumed run into its stored configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from steadyrl.core.command.literals import literal
from steadyrl.core.errors import SettingError, one_line, show
from steadyrl.training.config.teacher_names import KEY, is_module

# Keys that may change on resume: they decide when, where and with which rounding, not what is
# learned (saved state is always float32).
MUTABLE_KEYS = (
    *("total_steps", "device", "precision", "deterministic", "threads"),
    *("stop_timeout", "agent.compile", "agent.replay.device", "env.step_timeout"),
    *("env.max_restarts", "callbacks"),
)

MUTABLE_GROUPS = ("eval.", "log.", "report.", "profiler.", "checkpoint.", "memory.")

# Keys that name the run, its directory and origin, not its settings.
ABOUT_THE_RUN = ("resume", "run_dir", "run_name", "init_from")

# Keys that choose others: they are named first where a run is continued with another choice.
CHOOSE = ("agent.name", "env.id")

# Keys, or beginnings of keys, that names and shapes of weights depend on.
SHAPING = (
    *("env.id", "env.kwargs", "env.frame_stack", "env.action_masks", "env.image_", "env.wrappers"),
    *("agent.name", "agent.hidden", "agent.network.", "agent.recurrent.", "agent.shared_trunk"),
    *("agent.normalize_obs", "agent.popart", "agent.dueling", "agent.distribution."),
    "agent.noisy.enabled",
)

AUTO, NEWEST = "auto", "last"  # values of `resume` that name no run

# A key `module:Class` of a mapping, whose colon Hydra takes for the end of the key.
MODULE_KEY = re.compile(r"(?<=[{,\s])([A-Za-z_][\w.]*):([A-Za-z_]\w*)[ ]*:(?=[\s{n])")
# Free-form mappings that are passed to the environment: Hydra needs ++ to add keys to them.
FREE_FORM = ("env.kwargs.", "env.kwargs=")


class Continued(NamedTuple):
    """Configuration of a resumed run, and its changes."""

    config: dict[str, Any]
    changes: tuple[str, ...]  # such as "total_steps=200000 (was 100000)"


def override_list(name: str, given: object, example: str) -> list[str]:
    """Return a caller's KEY=VALUE as a list; SettingError says what to write for anything else."""
    if isinstance(given, str):
        texts = re.split(r"\s+(?=[+~]?[\w./@]+=)", given.strip())
    elif isinstance(given, Mapping):
        texts = [as_override(str(key), value) for key, value in given.items()]
    elif isinstance(given, Iterable):
        items = list(given)
        for place, entry in enumerate(items):
            if not isinstance(entry, str):
                reason = f"must be {_entry_hint(name, entry, example)}"
                raise SettingError(f"{name}[{place}]", one_line(repr(entry)), reason)
        return items
    else:
        texts = []
    hint = [text for text in texts if text] or [example]
    raise SettingError(name, one_line(repr(given)), f"must be a list of KEY=VALUE: {name}={hint}")


def _entry_hint(name: str, entry: object, example: str) -> str:
    """Return what to write for an entry of a list of overrides that is no text."""
    pairs: Iterable[Sequence[Any]] = entry.items() if isinstance(entry, Mapping) else ()
    if isinstance(entry, tuple | list) and len(entry) == 2:
        pairs = (entry,)
    if pairs:
        texts = [as_override(str(key), value) for key, value in pairs]
        return f"KEY=VALUE: {', '.join(map(repr, texts))}"
    kind = entry if isinstance(entry, type) else type(entry)
    if callable(getattr(kind, "reset", None)) and callable(getattr(kind, "step", None)):
        env_id, key = f"{kind.__name__}-v0", "id" if name == "env" else "env.id"
        registered = f'gym.register("{env_id}", {kind.__name__})'
        return f"an id that is registered: {registered} and {f'{key}={env_id}'!r}"
    return f"KEY=VALUE: {name}={[example]}"


def merge_overrides(
    stored: Mapping[str, Any], fresh: Mapping[str, Any], typed: Sequence[str]
) -> Continued:
    """Return the stored configuration with the overrides in `typed` applied.

    `fresh` is the configuration of the command line alone; only the keys in `typed` are read from
    it. Raises SettingError for keys that would change the meaning of saved state.
    """
    config = deepcopy(dict(stored))
    before, after = dict(flatten(stored)), dict(flatten(fresh))
    changes = []
    # The run's own agent, typed again, sets none of its keys to the defaults.
    typed = [text for text in typed if text != f"agent={before.get('agent.name')}"]
    keys = overridden_keys(typed, list(after))
    fits = not any(key.startswith(SHAPING) and before.get(key) != after[key] for key in keys)
    for key in sorted(keys, key=lambda key: (key not in CHOOSE, key)):
        same = key in before and before[key] == after[key]
        if same or (key in ABOUT_THE_RUN and key != "init_from"):
            continue
        was = f"it was {show(before[key])}" if key in before else "it was not set"
        if key == "init_from":
            reason = f"has no effect on a run that is continued ({was}): leave it out"
            raise SettingError(key, show(after[key]), reason)
        change = (key, before.get(key), after[key])
        if not (is_mutable(key) or _is_moved_teacher(*change) or _names_module(*change)):
            origin = ", from this one's policy with init_from=…" if fits else ""
            raise SettingError(
                key,
                show(after[key]),
                f"cannot change when a run is continued ({was}{_set_by(key, typed)}): what the "
                f"run has learned and kept depends on it; start a new run{origin}",
            )
        set_key(config, key, after[key])
        changes.append(f"{key}={show(after[key])} ({was.removeprefix('it ')})")
    return Continued(config, tuple(changes))


def _is_moved_teacher(key: str, was: Any, now: Any) -> bool:
    """Return whether a teacher is given by another path; checkpoints know its weights' hash."""
    return key == KEY and all(isinstance(name, str) and not is_module(name) for name in (was, now))


def _names_module(key: str, was: Any, now: Any) -> bool:
    """Return whether an id adds the module that registers it, which a script did before."""
    return key == "env.id" and isinstance(now, str) and now.partition(":")[2] == was


def _set_by(key: str, typed: Sequence[str]) -> str:
    """Return what set a key that is not typed itself, such as a preset; "" if it is typed."""
    if any(overridden_keys([text], [key]) and _name(text) == key for text in typed):
        return ""
    groups = [text for text in typed if overridden_keys([text], [key])]
    return f"; {groups[-1]} sets it: leave that out" if groups else ""


def has_changed(key: str, changes: Sequence[str]) -> bool:
    """Return whether a key is among a continued run's changes."""
    return any(change.startswith(f"{key}=") for change in changes)


def is_mutable(key: str) -> bool:
    """Return whether a key may change on resume."""
    return key in MUTABLE_KEYS or key.startswith(MUTABLE_GROUPS)


def flatten(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (full key, value) of every leaf; an empty group counts as a leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def overridden_keys(typed: Sequence[str], keys: Sequence[str]) -> set[str]:
    """Return the keys that the overrides set, directly or by a group or preset."""
    found: set[str] = set()
    for override in typed:
        name = _name(override)
        if name == "experiment":
            return set(keys)
        found |= {key for key in keys if key == name or key.startswith(f"{name}.")}
    return found


def as_override(key: str, value: Any) -> str:
    """Return `key=value` with a value that Hydra and YAML read alike, in full."""
    return f"{key}={literal(value)}"


def for_hydra(override: str) -> str:
    """Return an override as Hydra reads it; what is so already stays."""
    return f"++{override}" if override.startswith(FREE_FORM) else escape_colons(override)


def escape_colons(override: str) -> str:
    """Return an override of env.wrappers with `{module:Class: …}` as Hydra reads it."""
    key, equals, value = override.partition("=")
    if key.lstrip("+") != "env.wrappers":
        return override
    return key + equals + MODULE_KEY.sub(r"\1\\:\2:", value)


def key_of(override: str) -> str:
    """Return the key or group of an override, as it was typed."""
    return override.partition("=")[0].lstrip("+~")


def without_hydra(overrides: Iterable[str]) -> list[str]:
    """Return the overrides but for those of Hydra's own configuration."""
    return [text for text in overrides if not key_of(text).startswith(("hydra.", "hydra/"))]


def preset_options(sources: Iterable[Any]) -> list[str]:
    """Return `--config-dir=…` for the folder of presets among the sources that Hydra names."""
    return [
        f"--config-dir={each['path']}" for each in sources if each["provider"] == "command-line"
    ]


def _name(override: str) -> str:
    """Return the key or group of an override, with dots and without its package."""
    return key_of(override).partition("@")[0].replace("/", ".")


def set_key(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its full key."""
    *groups, name = key.split(".")
    for group in groups:
        config = config.setdefault(group, {})
    config[name] = value
