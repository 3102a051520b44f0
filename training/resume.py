"""Continue a run: its stored configuration, with those changes that leave its state its meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from memory.errors import SettingError
from training.manifest import CheckpointError, NewerFormatError, manifest_facts, saved_below
from training.run_directory import LAST, absolute
from training.settings import load_settings, missing_keys
from training.teachers import refuse_foreign_teacher
from training.typed import show

# What may be another in the continued run: it decides when and where, and how numbers are rounded,
# not what is learned; whatever is saved is float32.
FREE = (
    *("total_steps", "device", "precision", "deterministic", "threads"),
    *("stop_timeout", "agent.compile", "env.step_timeout", "env.max_restarts"),
)
FREE_GROUPS = ("eval.", "log.", "checkpoint.", "memory.")
# What names the run rather than being part of it.
ABOUT_THE_RUN = ("resume", "run_dir", "init_from")

AUTO = "auto"
SHOWN = 3  # keys that are named where many are missing
NOTHING = "has no checkpoint to continue from"


class Continued(NamedTuple):
    """The configuration of a continued run, and what is another in it than before."""

    config: dict[str, Any]
    changes: tuple[str, ...]  # such as "total_steps=200000 (was 100000)"


def stored(
    resume: str, directory: Path, fresh: Mapping[str, Any], typed: Sequence[str]
) -> Continued | None:
    """Return the configuration of the run in `directory`; None where `auto` starts a new one.

    It comes from the newest checkpoint that has one, whose hash proves it; the rest is checked
    when it is used.
    """
    reasons = []
    for saved in saved_below(directory / "checkpoints"):
        try:
            return _continued(saved.path, resume, directory, fresh, typed)
        except NewerFormatError:  # the one before would lose what came after it
            raise
        except CheckpointError as error:  # the one before may do
            reasons.append(str(error))
    if resume != AUTO or reasons:
        raise CheckpointError("; ".join(reasons) or f"resume={resume}: {directory} {NOTHING}")
    if (directory / LAST).exists():
        raise CheckpointError(f"resume={resume}: the run in {directory} is over, and {NOTHING}")
    return None


def _continued(
    checkpoint: Path, resume: str, directory: Path, fresh: Mapping[str, Any], typed: Sequence[str]
) -> Continued:
    config = whole_config(checkpoint, manifest_facts(checkpoint))
    refuse_foreign(checkpoint, config, fresh)
    refuse_foreign_teacher(checkpoint, config, fresh)
    found = continued(config, fresh, typed)
    asked = fresh.get("run_dir")
    if asked and absolute(Path(asked)) != directory:
        stays = f"run_dir={directory} (not {asked}: a continued run stays where it is)"
        found = found._replace(changes=(*found.changes, stays))
    found.config.update(run_dir=str(directory), resume=resume)
    try:
        load_settings(found.config)
    except SettingError as error:
        if any(change.startswith(f"{error.field}=") for change in found.changes):
            raise
        raise CheckpointError(f"{checkpoint}: its configuration cannot be used: {error}") from None
    return found


def whole_config(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of what was saved; what it lacks is not guessed."""
    config = facts.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds no configuration")
    missing = missing_keys(config)
    if missing:
        names = ", ".join(missing[:SHOWN]) + (" …" if len(missing) > SHOWN else "")
        raise CheckpointError(
            f"{path}: its configuration lacks {names}, and what the run did without is not known: "
            "use the version that saved it"
        )
    return deepcopy(config)


def refuse_foreign(checkpoint: Path, config: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    """Refuse what no resolved configuration holds, and modules that only a checkpoint asks for."""
    for key, value in leaves(config):
        if "${" in f"{key}{value}":
            raise CheckpointError(f"{checkpoint}: {key}={show(value)} is no value but a reference")
    asked = {name for _, name in modules(fresh["env"])}
    for key, name in modules(config.get("env")):
        if name not in asked:
            raise CheckpointError(
                f"{checkpoint}: {key}={show(name)} imports a module, which a checkpoint cannot ask "
                f"for: type {key}=… with it too"
            )


def modules(env: object) -> list[tuple[str, str]]:
    """Return the keys and names below `env` for which somebody's own module is imported."""
    if not isinstance(env, Mapping):
        return []
    named = [("env.id", env.get("id"))]
    wrappers = env.get("wrappers")
    for each in wrappers if isinstance(wrappers, list | tuple) else ():
        named += [
            ("env.wrappers", name) for name in (each if isinstance(each, Mapping) else [each])
        ]
    return [(key, name) for key, name in named if isinstance(name, str) and ":" in name]


def continued(
    stored: Mapping[str, Any], fresh: Mapping[str, Any], typed: Sequence[str]
) -> Continued:
    """Return the stored configuration with the changes somebody typed.

    `fresh` is what the command line alone would give; of it only what `typed` (its overrides)
    names is looked at. What would change the meaning of saved state is refused.
    """
    config = deepcopy(dict(stored))
    before, after = dict(leaves(stored)), dict(leaves(fresh))
    changes = []
    for key in sorted(named(typed, list(after))):
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
        put(config, key, after[key])
        changes.append(f"{key}={show(after[key])} ({was.removeprefix('it ')})")
    return Continued(config, tuple(changes))


def is_free(key: str) -> bool:
    """Tell whether a key may change when a run is continued."""
    return key in FREE or key.startswith(FREE_GROUPS)


def leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every full key with its value; an empty group is a value."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def named(typed: Sequence[str], keys: Sequence[str]) -> set[str]:
    """Return the keys that overrides are about: themselves, or all of a group or a preset."""
    found: set[str] = set()
    for override in typed:
        name = override.partition("=")[0].lstrip("+~").partition("@")[0].replace("/", ".")
        if name == "experiment":
            return set(keys)
        found |= {key for key in keys if key == name or key.startswith(f"{name}.")}
    return found


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a full key."""
    *groups, name = key.split(".")
    for group in groups:
        config = config.setdefault(group, {})
    config[name] = value
