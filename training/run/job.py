"""A job: the composed configuration, validated settings, and the environment's spaces."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from steadyrl.agents.registry import SupportsMasks, algorithms_for, of_rank, validate_actions
from steadyrl.core.errors import CommandError, SettingError, describe, show
from steadyrl.core.files import unchanged_directory
from steadyrl.envs.factory import probe
from steadyrl.envs.types import EnvSpec
from steadyrl.training.callbacks.runner import find_callbacks
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    manifest_metadata,
    saved_below,
)
from steadyrl.training.checkpoints.resume import (
    find_last,
    find_origin,
    load_stored_config,
    stored_config,
)
from steadyrl.training.checkpoints.run_directory import (
    CHECKPOINTS,
    CONFIG,
    ONE_OF_SEVERAL,
    RUNS,
    absolute,
    validate_no_links,
    validate_not_in_use,
)
from steadyrl.training.config.hints.explain import explain
from steadyrl.training.config.job_names import job_name
from steadyrl.training.config.outside_agents import offer_agents
from steadyrl.training.config.overrides import AUTO, NEWEST, for_hydra
from steadyrl.training.config.preset_files import preset_folder, preset_place
from steadyrl.training.config.schema import UnknownKeyError
from steadyrl.training.config.settings import CONFIGS, Job, Settings, load_settings
from steadyrl.training.config.teacher_names import make_teacher_path_absolute
from steadyrl.training.config.urls import is_url
from steadyrl.training.mirror.fetch import fetched_manifests, holds_checkpoint
from steadyrl.training.mirror.remote import mirror_url
from steadyrl.training.run.hardware import validate_machine
from steadyrl.training.run.rank_info import rank_info


class Planned(Protocol):
    """A job of a sweep."""

    run_dir: str

    @property
    def begun(self) -> bool:
        """Whether there is a run to resume."""


def probed(settings: Settings) -> tuple[Settings, EnvSpec]:
    """Return the environment's spaces, and the settings with `action_masks` resolved."""
    env = settings.run.env
    if not (isinstance(settings.agent, SupportsMasks) and settings.agent.takes_masks):
        if env.action_masks == "true":
            reason = f"agent {settings.agent.name} does not support action masks"
            raise SettingError("env.action_masks", "true", reason)
        env = env.with_masks(False)
    try:
        spec = probe(env)
    except SettingError as error:
        raise error.below("env") from None
    run = replace(settings.run, env=env.with_masks(spec.mask > 0))
    return replace(settings, run=run), spec


def compose_one(overrides: list[str]) -> DictConfig:
    """Compose the configuration of a single run, without Hydra's launchers and sweepers."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        typed = [offer_agents(for_hydra(text)) for text in overrides]
        config = hydra.compose("config", typed, return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    del config.hydra
    return config


def accept(
    config: DictConfig,
    sweep_overrides: Sequence[str] = (),
    sweep_job: Planned | None = None,
    probing: AbstractContextManager[None] | None = None,
) -> Job:
    """Validate a composed configuration, before anything slow is imported or written.

    `sweep_overrides`: the command line of the whole sweep. `sweep_job`: this job of a sweep, which
    is resumed if it was begun before. `probing`: entered while the environment is built to read
    its spaces. Errors name the line of a preset that they are about.
    """
    try:
        return _accept(config, sweep_overrides, sweep_job, probing or nullcontext())
    except SettingError as error:
        raise error.with_details(
            *error.details, *preset_place(error.field, typed_overrides())
        ) from None


def _accept(
    config: DictConfig,
    sweep_overrides: Sequence[str],
    sweep_job: Planned | None,
    probing: AbstractContextManager[None],
) -> Job:
    values = resolved(config)
    make_teacher_path_absolute(values)
    if sweep_job is not None:
        values["run_dir"] = sweep_job.run_dir
        if sweep_job.begun and values["resume"] is None:
            values["resume"] = AUTO
    if values["resume"] == NEWEST:
        values["resume"] = str(find_last(absolute(RUNS)))
    typed = typed_overrides()
    settings = valid_settings(values)
    if settings.run.seeds is not None:  # by another caller than the command
        reason = "are many runs, and this is one: call train for each"
        raise SettingError("seeds", settings.run.seeds, reason)
    # Resolved first: an environment's code may change the working directory.
    directory = absolute(run_directory_of(settings, sweep_overrides))
    settings = _from_mirror(values, settings, directory)
    resume = settings.run.resume
    named = resume not in (None, AUTO) and not is_url(resume)
    checkpoint = find_origin(str(resume)).checkpoint if named else None
    validate_no_links(directory)
    if rank_info().rank == 0:
        validate_not_in_use(directory)
    changes: tuple[str, ...] | None = None
    if resume is not None:
        remote = fetched_manifests(resume) if is_url(resume) else nullcontext()
        with remote as source:
            if source is not None and not settings.run.run_dir:
                directory = absolute(_directory_of(source, directory))
            found = load_stored_config(resume, directory, values, typed, source)
        if found is not None:
            values, changes = found.config, found.changes
            settings = load_settings(values)
    validate_machine(settings.run)
    if settings.run.callbacks and rank_info().size > 1:
        reason = "cannot be combined with torchrun"
        raise SettingError("callbacks", show(settings.run.callbacks), reason)
    callbacks = find_callbacks(settings.run.callbacks)
    settings = _with_absolute_init_from(settings)
    with probing, unchanged_directory():
        settings, spec = probed(settings)
    _validate_agent(settings, spec)
    files = _hydra_files(config)
    return Job(settings, spec, values, files, directory, changes, checkpoint, callbacks=callbacks)


def _with_absolute_init_from(settings: Settings) -> Settings:
    """Return settings whose `init_from` is found from any working directory."""
    path = settings.run.init_from
    if path is None:
        return settings
    path = os.path.abspath(os.path.expanduser(path))
    return replace(settings, run=replace(settings.run, init_from=path))


def valid_settings(values: dict[str, Any]) -> Settings:
    """Return the settings of a configuration; an error for an unknown key names similar ones."""
    try:
        return load_settings(values)
    except UnknownKeyError as error:
        typed, presets = typed_overrides(), preset_folder()
        reason = CommandError(explain(error, typed, multirun=False, presets=presets))
        raise reason.with_details(*preset_place(error.field, typed)) from error


def _validate_agent(settings: Settings, spec: EnvSpec) -> None:
    """Let the agent validate its settings for one rank's part of the steps."""
    here, total = rank_info(), settings.run.total_steps
    steps_of_rank = -(-total // here.size)
    try:
        validate_actions(settings.agent, spec)
        of_rank(settings.agent, here.rank, here.size).validate_fit(spec, steps_of_rank)
    except SettingError as error:
        if error.field == "agent":
            others = " or ".join(f"agent={name}" for name in algorithms_for(spec.action))
            raise SettingError("agent", error.value, f"{error.reason}; try {others}") from None
        if here.size == 1 or error.field != "total_steps":
            raise
        reason = f"gives each of {here.size} ranks {steps_of_rank:,}, which {error.reason}"
        raise SettingError(error.field, total, reason) from None


def typed_overrides() -> list[str]:
    """Return the overrides as typed, without resolving them again."""
    typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(typed, list)
    return typed


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain values."""
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except Exception as error:  # resolvers run users' code
        key = error.full_key if isinstance(error, OmegaConfBaseException) else None
        reason = str(error).splitlines()[0] if str(error) else describe(error)
        raise CommandError(f"{key or 'the configuration'}: {reason}") from error
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def _hydra_files(config: DictConfig) -> dict[str, Any]:
    h = HydraConfig.get()
    return {
        "config": config,
        "hydra": OmegaConf.create({"hydra": OmegaConf.to_container(h, resolve=False)}),
        "overrides": typed_overrides(),
    }


def _from_mirror(values: dict[str, Any], settings: Settings, directory: Path) -> Settings:
    """Let `resume=auto` continue from `checkpoint.mirror` where the directory holds no run."""
    mirror = settings.run.checkpoint.mirror
    if settings.run.resume != AUTO or mirror is None or (directory / CONFIG).exists():
        return settings
    url = mirror_url(mirror, directory)
    if saved_below(directory / CHECKPOINTS) or not holds_checkpoint(url):
        return settings
    values["resume"] = url
    return valid_settings(values)


def _directory_of(source: Path, otherwise: Path) -> Path:
    """Return a new directory for the run whose manifests are in `source`."""
    for saved in saved_below(source / CHECKPOINTS):
        with suppress(CheckpointError):  # `load_stored_config` says what is wrong with it
            config = stored_config(saved.path, manifest_metadata(saved.path))
            env, agent = str(config["env"]["id"]), str(config["agent"]["name"])
            return default_path(env, agent, config["seed"], config["run_name"])
    return otherwise


def run_directory_of(settings: Settings, sweep_overrides: Sequence[str]) -> Path:
    """Return the directory that was named, is continued, or is made for a new run."""
    h, run = HydraConfig.get(), settings.run
    if run.resume not in (None, AUTO) and not is_url(run.resume):
        origin = find_origin(str(run.resume))
        # One of its checkpoints may be continued elsewhere; a run stays where it is.
        return Path(run.run_dir) if origin.checkpoint and run.run_dir else origin.run
    if run.run_dir:
        return Path(run.run_dir)
    if h.mode == RunMode.MULTIRUN:
        whole = Path(h.runtime.output_dir)
        if h.sweep.subdir != ".":  # it was typed
            return whole
        return whole / job_name(h.job.num, typed_overrides(), sweep_overrides)
    if run.resume == AUTO:
        reason = "needs run_dir=… too: the directory to start in, or to continue"
        raise SettingError("resume", AUTO, reason)
    return default_path(run.env.id, settings.agent.name, run.seeds or run.seed, run.run_name)


def default_path(env: str, agent: str, seeds: int | Sequence[int], name: str | None = None) -> Path:
    """Return outputs/<env>/<agent>/[<name>-]<time>-<seed>-<short id>, unique per run."""
    of = f"s{seeds}" if isinstance(seeds, int) else f"{len(seeds)}seeds"
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
    prefix = f"{_safe(name)}-" if name else ""
    folder = f"{prefix}{stamp}-{of}-{uuid.uuid4().hex[:6]}"
    return RUNS / _safe(env) / _safe(agent) / folder


def _safe(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in text)


def display_name(name: str | None, path: Path) -> str:
    """Return the name that sinks show: `run_name`, with the folder's for one run of several."""
    if name is None:
        return path.name
    return f"{name}-{path.name}" if ONE_OF_SEVERAL.fullmatch(path.name) else name
