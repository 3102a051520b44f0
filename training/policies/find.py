"""Find saved policies by run or policy directory, and check that an environment fits.

Imports nothing slow, so that a wrong name or setting is rejected at once.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import ExpectedError, SettingError, describe, show
from steadyrl.envs.settings import EnvSettings
from steadyrl.training.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    manifest_metadata,
    part_names,
    recover_path,
    saved_at,
    saved_below,
)
from steadyrl.training.checkpoints.resume import (
    ForeignModulesError,
    about,
    stored_config,
    validate_no_foreign_modules,
    validate_no_references,
)
from steadyrl.training.checkpoints.run_directory import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    LAST,
    in_use,
    newest_runs,
    read_summary,
    resume_override,
    similar,
)
from steadyrl.training.config.overrides import set_key
from steadyrl.training.config.settings import Settings, load_settings

EXPORTED = ".safetensors"  # ends the name of a policy that is exported to one file
AGENT = "agent"  # the part of a checkpoint that has the policy's weights
LARGEST_NUMBER = 8  # bytes of the largest dtype of a weight


class PolicyError(ExpectedError):
    """No policy was found under the given name."""

    exit_code = 2


@dataclass(frozen=True)
class Policy:
    """A policy that was found: its path, manifest metadata, and remarks to print."""

    path: Path
    metadata: dict[str, Any]
    remarks: tuple[str, ...] = ()

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of the environment that the policy was trained in."""
        spec = self.metadata.get("spec")
        if not isinstance(spec, dict):
            raise CheckpointError(f"{self.path}: its manifest has no environment spec")
        return spec

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is a checkpoint of training."""
        return saved_at(self.path) is not None

    @property
    def best(self) -> bool:
        """Whether it was chosen because it had the best score of its run's evaluations."""
        return self.metadata.get("best") is True

    @property
    def nbytes(self) -> int:
        """Upper bound of the size of its weights, from the shapes in the manifest."""
        weights = self.metadata.get("weights")
        shapes: list[Any] = list(weights.values()) if isinstance(weights, dict) else [None]
        if not all(
            isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
            for shape in shapes
        ):
            raise CheckpointError(f"{self.path}: its manifest has no weight shapes")
        return LARGEST_NUMBER * sum(int(prod(shape)) for shape in shapes)


def find_policy(path: Path, *, best: bool = False) -> Policy:
    """Return the policy or checkpoint at `path`, or the last (or best) policy of its run."""
    path = path if path.name else path.resolve()
    if not os.path.exists(path):  # os.path.exists also accepts invalid names
        there = ", ".join(saved.path.name for saved in reversed(saved_below(path.parent)))
        what = f"checkpoint; there are {there}" if there else "run or policy"
        raise PolicyError(f"{path}: no such {what}{'' if there else similar(path)}")
    if not path.is_dir():
        raise PolicyError(f"{path}: is a file; name a run's directory, or its {LAST}/")
    here = recover_path(path)
    if (here / MANIFEST).exists():
        if not {LAST, AGENT} & part_names(here):
            raise CheckpointError(f"{path}: holds no policy")
        found = Policy(here, manifest_metadata(here))
        if best and not found.best:
            raise PolicyError(f"{path}: is one policy; the best is chosen in a run's directory")
        return found
    inside = saved_below(path)
    if inside:
        raise PolicyError(f"{path}: holds checkpoints; name one, such as {inside[0].path}")
    if path.name in (LAST, BEST) and not (path / CONFIG).exists():
        raise CheckpointError(f"{path}: has no {MANIFEST}: damaged, or not a policy")
    return _of_run(path, best=best)


def _of_run(run: Path, *, best: bool) -> Policy:
    running = in_use(run)
    there = [name for name in (LAST, BEST) if recover_path(run / name).is_dir()]
    if not there and not (best and (run / CONFIG).exists()):
        raise _no_policy(run, running=running)
    if best and BEST not in there:
        raise PolicyError(f"{run}: has no {BEST}/: it was never evaluated")
    name = BEST if best else there[0]
    remarks = []
    if running:
        remarks.append(f"{run} is still running: its newest weights are in checkpoints/")
    if name == BEST and not best:
        remarks.append(f"no {LAST}/ yet: using {BEST}/")
    with naming_the_other(run / name):
        found = recover_path(run / name)
        return Policy(found, manifest_metadata(found), tuple(remarks))


@contextmanager
def naming_the_other(path: Path) -> Iterator[None]:
    """Name the other policy of its run, if there is one, where the policy at `path` is damaged."""
    try:
        yield
    except CheckpointError as error:
        other = path.with_name(BEST if path.name == LAST else LAST)
        if path.name in (LAST, BEST) and recover_path(other).is_dir() and not error.details:
            raise error.with_details(f"its run has another policy: {other}") from None
        raise


def _no_policy(run: Path, *, running: bool) -> PolicyError:
    """Return why there is no policy, and where there are some."""
    if running:
        when = f"{BEST}/ is saved at its first evaluation, {LAST}/ at its end"
        return PolicyError(f"{run}: no policy yet: {when}")
    if (run / CONFIG).exists() and read_summary(run).get("status") == "finished":
        saved = saved_below(run / CHECKPOINTS)
        there = f"; name a checkpoint, such as {saved[0].path}" if saved else ""
        return PolicyError(f"{run}: has no {LAST}/: it was removed{there}")
    if (run / CONFIG).exists():
        again = f"resume it with {resume_override(run)}"
        return PolicyError(f"{run}: no policy: the run did not finish; {again}")
    below = newest_runs(run, LAST)
    if len(below) < 2:
        hint = f"; did you mean {below[0]}?" if below else ""
        return PolicyError(f"{run}: neither a run nor a policy{hint}")
    error = PolicyError(f"{run}: neither a run nor a policy; the newest runs in it:")
    return error.with_details(*(f"{shlex.quote(str(each))}  # {about(each)}" for each in below))


def settings_for(
    program: str, typed: Sequence[str], policy: Policy, overrides: Sequence[str]
) -> Settings:
    """Return a policy's settings, or say how a program's user names the modules it imports."""
    try:
        return settings_of(policy, overrides)
    except ForeignModulesError as error:
        more = [part for text in error.overrides for part in ("--env", text.removeprefix("env."))]
        command = f"{command_of(program)} {shlex.join([*typed, *more])}"
        raise error.with_details(command) from None


def saved_settings(policy: Policy) -> Settings:
    """Return the settings of a policy's training, as saved: no module is imported by them."""
    saved = stored_config(policy.path, policy.metadata)
    validate_no_references(policy.path, saved)
    try:
        settings = load_settings(saved)
    except SettingError as error:
        raise _unusable(policy, error) from None
    return _masked_as_trained(policy, settings)


def _masked_as_trained(policy: Policy, settings: Settings) -> Settings:
    """Return the settings with masks as in training, whatever the environment offers."""
    env = settings.run.env.with_masks(bool(policy.spec.get("mask")))
    return replace(settings, run=replace(settings.run, env=env))


def _unusable(policy: Policy, error: SettingError) -> CheckpointError:
    return CheckpointError(f"{policy.path}: its configuration cannot be used: {error}")


def settings_of(
    policy: Policy, overrides: Sequence[str], named: EnvSettings | None = None
) -> Settings:
    """Return the settings of a policy's training, with overrides of its environment applied.

    Masks are as in training. An override is KEY=VALUE below `env`. Modules are imported only if
    named in `overrides`, or by `named`: settings that the caller has typed before.
    """
    changed = stored_config(policy.path, policy.metadata)
    if not isinstance(changed["env"], dict):
        raise CheckpointError(f"{policy.path}: its configuration has no environment")
    typed: dict[str, Any] = {"env": {"id": None}}
    if named is not None:
        typed["env"] = {"id": named.id, "wrappers": list(named.wrappers)}
    for override in overrides:
        key, value = _read(override)
        if key == "env.num_envs":
            raise SettingError(key, show(value), "has no effect: only training has so many")
        set_key(changed, key, value)
        set_key(typed, key, value)
    try:
        validate_no_foreign_modules(policy.path, changed, typed)
    except ForeignModulesError as error:
        needed = ", ".join(repr(text.removeprefix("env.")) for text in error.overrides)
        raise error.with_details(f"env=[{needed}]") from None
    try:
        return _masked_as_trained(policy, load_settings(changed))
    except SettingError as error:
        if any(error.field.startswith(_read(text)[0]) for text in overrides):
            raise
        raise _unusable(policy, error) from None


def _read(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    key = key.strip().removeprefix("env.")
    if not (key and equals):
        raise PolicyError(f"--env {override}: write KEY=VALUE, such as kwargs.map_name=8x8")
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except Exception as error:  # of the YAML parser or of OmegaConf
        raise PolicyError(f"--env {override}: {describe(error)}") from None
    assert isinstance(read, dict)
    return f"env.{key}", read["value"]


def validate_same_spaces(
    policy: Policy, env_id: str, offered: Mapping[str, Any], trained: Mapping[str, Any]
) -> None:
    """Raise SettingError if observations or actions are not those of training."""
    try:
        wrong = _space_differences(offered, trained)
    except (KeyError, TypeError, AttributeError, ValueError):
        reason = "its environment spec cannot be read"
        raise CheckpointError(f"{policy.path}: {reason}") from None
    if wrong:
        was = trained.get("id")
        raise SettingError(
            "env.id", env_id, f"{policy.path} was trained on {was}: {' and '.join(wrong)}"
        )


def action_difference(trained: Mapping[str, Any], offered: Mapping[str, Any]) -> str:
    """Return how other actions differ from those of training; "" if they only have other bounds."""
    there, here = (_shown(spec, ("action",)) for spec in (trained, offered))
    boxes = all(spec["action"]["kind"] == "BoxActions" for spec in (trained, offered))
    return "" if boxes or there == here else f"actions are {there} there and {here} here"


def _space_differences(offered: Mapping[str, Any], trained: Mapping[str, Any]) -> list[str]:
    return [
        f"{what} {_shown(trained, keys)} in training and {_shown(offered, keys)} now"
        for what, keys in (
            ("observations", ("frame_shape", "frame_stack", "dtype")),
            ("actions", ("action",)),
        )
        if any(trained.get(key) != offered.get(key) for key in keys)
    ]


def _shown(spec: Mapping[str, Any], keys: Sequence[str]) -> str:
    if keys == ("action",):
        action = dict(spec["action"])
        kind = action.pop("kind").removesuffix("Actions")
        return f"{kind}({', '.join(f'{k}={show(v)}' for k, v in action.items())})"
    stack = f"{spec['frame_stack']} of " if spec["frame_stack"] != 1 else ""
    return f"{stack}{show(spec['frame_shape'])} {spec['dtype']}"
