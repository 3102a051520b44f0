"""What a resumed run takes from the run it continues, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadyrl.core.errors import SettingError
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    FormatError,
    manifest_metadata,
    saved_below,
)
from steadyrl.training.checkpoints.run_directory import LAST, absolute
from steadyrl.training.config.overrides import AUTO, flatten, merge_overrides
from steadyrl.training.config.schema import show
from steadyrl.training.config.settings import load_settings, missing_keys
from steadyrl.training.config.teacher_names import is_module, named

if TYPE_CHECKING:
    from steadyrl.training.config.overrides import Continued


def validate_teacher(checkpoint: Path, config: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    """Refuse a module that only a checkpoint asks for."""
    name, typed = named(config), named(fresh)
    if isinstance(name, str) and is_module(name) and name != typed:
        raise CheckpointError(
            f"{checkpoint}: agent.teacher.policy={show(name)} imports a module, which a checkpoint "
            "cannot ask for: type agent.teacher.policy=… with it too"
        )


SHOWN = 3  # keys that are named where many are missing

NOTHING = "has no checkpoint to continue from"


def load_stored_config(
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
        except FormatError:  # the one before would lose what came after it
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
    config = stored_config(checkpoint, manifest_metadata(checkpoint))
    validate_no_foreign_modules(checkpoint, config, fresh)
    validate_teacher(checkpoint, config, fresh)
    found = merge_overrides(config, fresh, typed)
    asked = fresh.get("run_dir")
    if asked and absolute(Path(asked)) != directory:
        stays = f"run_dir={directory} (not {asked}: a continued run stays where it is)"
        found = found._replace(changes=(*found.changes, stays))
    name, kept = fresh.get("run_name"), config["run_name"]
    if name not in (None, kept):
        stays = f"run_name={show(kept)} (not {name}: a continued run keeps its name)"
        found = found._replace(changes=(*found.changes, stays))
    found.config.update(run_dir=str(directory), resume=resume)
    try:
        load_settings(found.config)
    except SettingError as error:
        if any(change.startswith(f"{error.field}=") for change in found.changes):
            raise
        raise CheckpointError(f"{checkpoint}: its configuration cannot be used: {error}") from None
    return found


def stored_config(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of what was saved; what it lacks is not guessed."""
    config = metadata.get("config")
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


def validate_no_foreign_modules(
    checkpoint: Path, config: Mapping[str, Any], fresh: Mapping[str, Any]
) -> None:
    """Refuse what no resolved configuration holds, and modules that only a checkpoint asks for."""
    for key, value in flatten(config):
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
