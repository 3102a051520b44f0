"""What a resumed run takes from the run it continues, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from steadyrl.core.errors import SettingError, show
from steadyrl.envs.settings import imported_names
from steadyrl.training.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    FormatError,
    manifest_metadata,
    saved_at,
    saved_below,
)
from steadyrl.training.checkpoints.run_directory import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    LAST,
    absolute,
    in_use,
    newest_runs,
    read_summary,
    resume_command,
    resume_override,
    set_aside,
    similar,
)
from steadyrl.training.config.overrides import (
    AUTO,
    NEWEST,
    as_override,
    flatten,
    has_changed,
    merge_overrides,
    overridden_keys,
)
from steadyrl.training.config.settings import load_settings, missing_keys
from steadyrl.training.config.teacher_names import KEY as TEACHER
from steadyrl.training.config.teacher_names import is_module, teacher_name
from steadyrl.training.config.urls import is_url

if TYPE_CHECKING:
    from steadyrl.training.config.overrides import Continued


class ForeignModulesError(CheckpointError):
    """A checkpoint names modules that the command does not; `overrides` name them all."""

    def __init__(self, checkpoint: Path, names: Sequence[tuple[str, str]], config: Any) -> None:
        shown = " and ".join(f"{key}={show(name)}" for key, name in names)
        what = "imports a module" if len(names) == 1 else "import modules"
        super().__init__(
            f"{checkpoint}: {shown} {what}, which a saved file cannot ask for: name it again"
            + (f" ({CALLBACKS}=[] leaves callbacks out)" if CALLBACKS in dict(names) else "")
        )
        self.overrides = _overrides_of(config, names)


class ForeignMirrorError(CheckpointError):
    """A checkpoint names a URL to copy the run to, and the command does not."""


SHOWN = 3  # keys or runs that are named where there are many
MOST_RUNS = 1_000  # that are looked at

CALLBACKS = "callbacks"

NOTHING = "has no checkpoint to continue from"


class Origin(NamedTuple):
    """The run that `resume` names, and the checkpoint, if it names one."""

    run: Path
    checkpoint: Path | None


def find_origin(resume: str) -> Origin:
    """Return what `resume=RUN`, `RUN/checkpoints` or `RUN/checkpoints/step-…` names."""
    try:
        path = Path(os.path.abspath(Path(resume).expanduser()))
        is_file = path.is_file()
    except (OSError, RuntimeError):  # no such home, another user's directory, a name too long
        path, is_file = absolute(Path(resume), "resume"), False
    if is_file:
        reason = f"is a file; name the run's directory: {resume_override(path.parent)}"
        raise SettingError("resume", resume, reason)
    for place in (path, Path(os.path.realpath(path))):  # a link may name a checkpoint
        if place.parent.name == CHECKPOINTS and saved_at(place):
            return Origin(place.parents[1], place)
    if path.name == CHECKPOINTS and not (path / CONFIG).exists():
        return Origin(path.parent, None)
    return Origin(path, None)


def load_stored_config(
    resume: str,
    directory: Path,
    fresh: Mapping[str, Any],
    typed: Sequence[str],
    source: Path | None,
) -> Continued | None:
    """Return the configuration of the run to continue; None where `auto` starts a new one.

    It comes from the checkpoint that `resume` names, or the newest that has one, whose hash proves
    it; the rest is checked when it is used. `source`: folder of the manifests of a URL.
    """
    named = resume != AUTO and source is None
    origin = find_origin(resume) if named else Origin(directory, None)
    if origin.checkpoint is not None:
        if not origin.checkpoint.is_dir():
            raise _no_such_checkpoint(resume, origin.run)
        return _continued(origin.checkpoint, resume, directory, fresh, typed)
    reasons = []
    for saved in saved_below((source or directory) / CHECKPOINTS):
        try:
            return _continued(saved.path, resume, directory, fresh, typed)
        except (FormatError, ForeignModulesError, ForeignMirrorError):
            raise  # the one before would lose what came after it
        except CheckpointError as error:  # the one before may do
            reasons.append(str(error))
    if reasons:
        raise CheckpointError("; ".join(reasons))
    if source is not None:
        raise CheckpointError(f"{resume}: {NOTHING}")
    if resume != AUTO:
        raise _nothing_to_resume(resume, directory)
    if (directory / LAST).exists():
        raise CheckpointError(f"resume={resume}: the run in {directory} is over, and {NOTHING}")
    return None


def _no_such_checkpoint(resume: str, run: Path) -> CheckpointError:
    there = [saved.path.name for saved in saved_below(run / CHECKPOINTS)]
    names = f"there are {', '.join(reversed(there))}" if there else f"{run} {NOTHING}"
    return CheckpointError(f"resume={resume}: no such checkpoint; {names}")


def _nothing_to_resume(resume: str, directory: Path) -> CheckpointError:
    """Return why there is nothing to resume, and what there is instead."""
    if not directory.exists():
        return CheckpointError(f"resume={resume}: no such directory{similar(Path(resume))}")
    if (directory / MANIFEST).exists():
        return CheckpointError(
            f"resume={resume}: is a policy, and {NOTHING}; start a new run from it with "
            f"init_from={resume}, or name its run's directory"
        )
    runs = [] if (directory / CONFIG).exists() else newest_runs(directory, CHECKPOINTS)
    if not runs:
        return CheckpointError(f"resume={resume}: {directory} {NOTHING}")
    error = CheckpointError(f"resume={resume}: is no run and {NOTHING}; the newest runs in it:")
    return error.with_details(*(f"{resume_command(run)}  # {about(run)}" for run in runs))


def find_last(folder: Path) -> Path:
    """Return the newest run below a folder that is neither finished nor in use."""
    runs = newest_runs(folder, CHECKPOINTS, MOST_RUNS)
    for run in runs:
        if read_summary(run).get("status") != "finished" and not in_use(run):
            return run
    if not runs:
        raise CheckpointError(f"resume={NEWEST}: there is no run in {folder}")
    error = CheckpointError(f"resume={NEWEST}: every run in {folder} is finished or in use")
    shown = (f"{resume_command(run)}  # {about(run)}" for run in runs[:SHOWN])
    raise error.with_details("the newest:", *shown)


def about(run: Path) -> str:
    """Return status and steps of a run, for lists of runs."""
    summary = read_summary(run)
    return f"{summary.get('status', 'no end yet')}, {summary.get('steps', '?')} steps"


def set_aside_later(run: Path, checkpoint: Path, token: str) -> Path | None:
    """Set aside what a run saved after one of its checkpoints; return where, None: nothing.

    `token`: the file that ties it to a tracker's run, which cannot delete the later steps.
    """
    chosen = saved_at(checkpoint)
    assert chosen is not None
    newer = [each for each in saved_below(run / CHECKPOINTS) if each[:2] > chosen[:2]]
    if not newer:
        return None
    later = [run / token] if (run / token).exists() else []
    later += [film for film in (run / "videos").glob("step-*.mp4") if film.stem > checkpoint.name]
    later += [run / name for name in (LAST, BEST) if _step_of(run / name) > chosen.step]
    later += [saved.path for saved in newer]
    return set_aside(run, later, f"{newer[0].step}-steps")


def _step_of(policy: Path) -> float:
    """Return the step that a policy was saved at; -1 without one."""
    if not policy.exists():
        return -1
    try:
        return float(manifest_metadata(policy)["step"])
    except (CheckpointError, KeyError, TypeError, ValueError):  # a damaged one goes too
        return float("inf")


def _continued(
    checkpoint: Path, resume: str, directory: Path, fresh: Mapping[str, Any], typed: Sequence[str]
) -> Continued:
    config = stored_config(checkpoint, manifest_metadata(checkpoint))
    replaced = {CALLBACKS: fresh[CALLBACKS]} if overridden_keys(typed, [CALLBACKS]) else {}
    try:
        validate_no_foreign_modules(checkpoint, {**config, **replaced}, fresh, trains=True)
    except ForeignModulesError as error:
        keys = {text.partition("=")[0] for text in error.overrides}
        rest = [text for text in typed if text.partition("=")[0] not in (*keys, "resume")]
        command = resume_command(resume, *rest, *error.overrides)
        raise error.with_details(command) from None
    found = merge_overrides(config, fresh, typed)
    asked = fresh.get("run_dir")
    if asked and absolute(Path(asked)) != directory:
        stays = (
            f"run_dir={directory} (not {asked}: a continued run stays where it is; to go on "
            f"elsewhere, name a checkpoint: {resume_override(checkpoint)})"
        )
        found = found._replace(changes=(*found.changes, stays))
    name, kept = fresh.get("run_name"), config["run_name"]
    if name not in (None, kept):
        stays = f"run_name={show(kept)} (not {name}: a continued run keeps its name)"
        found = found._replace(changes=(*found.changes, stays))
    found.config.update(run_dir=str(directory), resume=resume)
    _resolve_mirror(found.config, fresh, checkpoint, typed)
    try:
        load_settings(found.config)
    except SettingError as error:
        if has_changed(error.field, found.changes):
            raise
        raise CheckpointError(f"{checkpoint}: its configuration cannot be used: {error}") from None
    _validate_length(found, checkpoint)
    return found


def _validate_length(found: Continued, checkpoint: Path) -> None:
    """Refuse a new `total_steps` below what is done: it would be the run's length from now on."""
    saved, total = saved_at(checkpoint), found.config["total_steps"]
    done = 0 if saved is None else saved.step
    if done > total and has_changed("total_steps", found.changes):
        raise too_short(total, done)


def too_short(total: int, done: int) -> SettingError:
    """Return the error for a `total_steps` below the steps that are done."""
    reason = f"is the whole length, and {done:,} steps are done"
    more = f"total_steps={done + total} trains {total:,} more"
    return SettingError("total_steps", total, f"{reason}; {more}")


def _resolve_mirror(
    config: dict[str, Any], fresh: Mapping[str, Any], checkpoint: Path, typed: Sequence[str]
) -> None:
    """Copy to the URL that is resumed from; refuse another one that only a checkpoint asks for."""
    saving, resume = config["checkpoint"], str(config["resume"])
    if not isinstance(saving, dict):  # of a hostile file: refused with all other settings
        return
    if saving["mirror"] in (None, fresh["checkpoint"]["mirror"]):
        return
    if is_url(resume):
        saving["mirror"] = resume
        return
    rest = [text for text in typed if text.partition("=")[0] != "resume"]
    url = as_override("checkpoint.mirror", saving["mirror"])
    raise ForeignMirrorError(
        f"{checkpoint}: {url} has the run copied to a URL, which a saved file cannot ask for: "
        "name it in the command (checkpoint.mirror=null copies nothing)"
    ).with_details(resume_command(resume, *rest, url))


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


def validate_no_references(checkpoint: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a reference (${…}): resolved configurations hold none."""
    for key, value in flatten(config):
        if "${" in f"{key}{value}":
            raise CheckpointError(f"{checkpoint}: {key}={show(value)} is no value but a reference")


def validate_no_foreign_modules(
    checkpoint: Path, config: Mapping[str, Any], fresh: Mapping[str, Any], *, trains: bool = False
) -> None:
    """Raise CheckpointError for references (${…}), and for modules that only a checkpoint names.

    `trains`: also for modules of the teacher and of callbacks, which policies do without.
    """
    validate_no_references(checkpoint, config)
    asked = {name for _, name in modules(fresh)}
    missing = [(key, name) for key, name in modules(config) if name not in asked]
    if not trains:
        missing = [(key, name) for key, name in missing if key not in (TEACHER, CALLBACKS)]
    if missing:
        raise ForeignModulesError(checkpoint, missing, config)


def modules(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the keys and names for which a configuration has somebody's own module imported."""
    policy, env, callbacks = teacher_name(config), config.get("env"), config.get(CALLBACKS)
    found = [(TEACHER, policy)] if isinstance(policy, str) and is_module(policy) else []
    if isinstance(env, Mapping):
        name, wrappers = env.get("id"), env.get("wrappers")
        found += [("env.id", name)] if isinstance(name, str) and ":" in name else []
        for each in wrappers if isinstance(wrappers, list | tuple) else ():
            found += [("env.wrappers", name) for name in imported_names(each)]
    if isinstance(callbacks, list | tuple):
        found += [(CALLBACKS, name) for name in callbacks if isinstance(name, str)]
    return found


def import_overrides(config: Mapping[str, Any]) -> list[str]:
    """Return the overrides that a command must have to continue a run: modules, and its mirror."""
    mirror = config["checkpoint"]["mirror"]
    copied = [] if mirror is None else [as_override("checkpoint.mirror", mirror)]
    return [*_overrides_of(config, modules(config)), *copied]


def _overrides_of(config: Mapping[str, Any], names: Sequence[tuple[str, str]]) -> list[str]:
    values = dict(flatten(config))
    return [as_override(key, values[key]) for key in dict.fromkeys(key for key, _ in names)]
