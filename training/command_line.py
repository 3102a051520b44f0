"""From the command line to an accepted job; every refusal is one clear line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agents.registry import of_rank
from envs.types import EnvSpec
from memory.errors import ExpectedError, SettingError, describe, exit_with
from training.arguments import Arguments, CommandError, help_text, read, version
from training.failures import in_a_line, out_of_memory
from training.hardware import refuse_unfit_machine
from training.hints import explain
from training.launch import end_with_launcher, place
from training.probing import probed
from training.resume import AUTO, stored
from training.run_directory import absolute, default_path, refuse_in_use, refuse_links
from training.settings import CONFIGS, Job, Settings, load_settings
from training.sweep_names import run_name
from training.teachers import settle
from training.terminal import answering
from training.typed import UnknownKeyError, show

if TYPE_CHECKING:
    from training.sweep_jobs import SweepJob


class ForgetConfigurations(Callback):
    """Let a sweep go on without the configurations of jobs that are over."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Drop what Hydra would keep of a job besides its result."""
        job_return.cfg = job_return.hydra_cfg = None


def main(train: Callable[[Job], float | None]) -> None:
    """Compose the configuration, check it, train, and exit with the code that says how it went."""
    try:
        arguments = read(sys.argv[1:])
        if arguments.wants_help:
            with answering():
                print(help_text(CONFIGS), end="")
        elif arguments.wants_version:
            with answering():
                print(version())
        else:
            compose_and_train(train, arguments)
    except ExpectedError as error:
        exit_with(error)


class Task:
    """What Hydra calls with each configuration it composed."""

    def __init__(self, train: Callable[[Job], float | None], arguments: Arguments) -> None:
        self._train, self._arguments = train, arguments

    def __call__(self, config: DictConfig) -> float | None:
        """Train once; exit where that fails, unless it is a sweep, which goes on."""
        if not self._arguments.multirun:
            try:
                return self._attempt(config)
            except ExpectedError as error:
                exit_with(error)
        from training.sweep_run import current, run_job

        found = current(HydraConfig.get().sweep.dir)
        if found is None:  # another sweeper's: this error is raised at the sweep's end
            return self._attempt(config)
        options = [option for option in self._arguments.options if option != "--multirun"]
        return run_job(*found, lambda: self._attempt(config, found[1]), options)

    def _attempt(self, config: DictConfig, of_sweep: SweepJob | None = None) -> float | None:
        many = OmegaConf.is_interpolation(config, "seeds") or config.get("seeds") is not None
        with in_a_line():
            if many:
                from training.many_seeds import ManySeeds

                typed = self._arguments.overrides
                seeds = ManySeeds(*accept_seeds(config, typed, of_sweep), typed)
            else:
                job = accept(config, self._arguments.overrides, of_sweep)
        return seeds.train(self._train_one) if many else self._train_one(job)

    def _train_one(self, job: Job) -> float | None:
        with in_a_line(job):
            return self._train(job)


def compose_and_train(train: Callable[[Job], float | None], arguments: Arguments) -> None:
    """Let Hydra compose one job, or those of a sweep, and train each."""
    if place().size > 1:
        end_with_launcher()
        if arguments.multirun:
            raise CommandError(
                "--multirun and torchrun cannot be combined: a sweep is many runs, ranks are one; "
                "start torchrun once for each"
            )
    task = Task(train, arguments)
    # Otherwise Hydra prints its own errors over several lines and exits with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        if arguments.plain:
            config = compose_one(arguments.overrides)
        else:
            with answering() if arguments.prints else nullcontext():
                run_hydra(task, arguments)
            return
    except ExpectedError:
        raise
    except Exception as error:  # `task` raises expected errors only: the rest is about composing
        full = out_of_memory(error)
        if full is not None:
            raise full from error
        sweep = arguments.multirun
        reason = explain(error, arguments.overrides, CONFIGS, multirun=sweep)
        raise CommandError(reason) from error
    task(config)


def compose_one(overrides: list[str]) -> DictConfig:
    """Return the configuration of a single run, without what Hydra does for sweeps."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = hydra.compose("config", overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    del config.hydra
    return config


def run_hydra(task: Callable[[DictConfig], float | None], arguments: Arguments) -> None:
    """Let Hydra do what its options ask for: a sweep, or printing the configuration."""
    typed = sys.argv
    try:
        sys.argv = [*typed[:1], *arguments.options, *arguments.overrides]
        if arguments.multirun:
            from training.sweeper import install

            install()
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")(task)()
    except SystemExit as end:
        # Hydra ends so, after a line of its own, what it cannot print; a run's 1 is a bug's.
        sys.exit(SettingError.exit_code if end.code == 1 and arguments.prints else end.code)
    finally:
        sys.argv = typed


def accept(
    config: DictConfig, of_all_jobs: Sequence[str] = (), of_sweep: SweepJob | None = None
) -> Job:
    """Check a composed configuration before anything slow is imported or written.

    `of_all_jobs` is what was typed, for all jobs of a sweep together; `of_sweep` is this one, where
    the sweep keeps account of it: what it began before, it continues.
    """
    values = _resolved(config)
    settle(values)
    if of_sweep is not None:
        values["run_dir"] = of_sweep.run_dir
        if of_sweep.begun and values["resume"] is None:
            values["resume"] = AUTO
    typed = _typed()
    settings = _settings(values)
    if settings.run.seeds is not None:  # and somebody else than train.py asks for one
        raise SettingError("seeds", show(settings.run.seeds), "are many runs, and this is one")
    # Before any code of an environment runs, which may change the working directory.
    directory = absolute(_directory(settings, of_all_jobs))
    refuse_links(directory)
    if place().rank == 0:
        refuse_in_use(directory)
    changes: tuple[str, ...] | None = None
    if settings.run.resume is not None:
        found = stored(settings.run.resume, directory, values, typed)
        if found is not None:
            values, changes = found.config, found.changes
            settings = load_settings(values)
    refuse_unfit_machine(settings.run)
    settings, spec = probed(settings)
    _refuse_unfit_share(settings, spec)
    return Job(settings, spec, values, _hydra_files(config), directory, changes)


def accept_seeds(
    config: DictConfig, of_all_jobs: Sequence[str], of_sweep: SweepJob | None
) -> tuple[Path, tuple[int, ...], list[Job]]:
    """Do the same for each of `seeds`; return their directory, themselves, and the jobs left."""
    from training.many_seeds import each_seed

    settings = _settings(_resolved(config))
    if of_sweep is None:
        directory = absolute(_directory(settings, of_all_jobs))
    else:
        directory = Path(of_sweep.run_dir)
    refuse_links(directory)
    again = of_sweep is not None and of_sweep.begun
    configs = each_seed(config, settings.run, directory, _typed(), again=again)
    return directory, settings.run.seeds or (), [accept(each) for each in configs]


def _settings(values: dict[str, Any]) -> Settings:
    try:
        return load_settings(values)
    except UnknownKeyError as error:
        raise CommandError(explain(error, _typed(), CONFIGS, multirun=False)) from error


def _refuse_unfit_share(settings: Settings, spec: EnvSpec) -> None:
    """Let the agent refuse what it would have to do, alone or as one of several ranks."""
    here, total = place(), settings.run.total_steps
    share = -(-total // here.size)
    try:
        of_rank(settings.agent, here.rank, here.size).refuse_unfit(spec, share)
    except SettingError as error:
        if here.size == 1 or error.field != "total_steps":
            raise
        reason = f"gives each of {here.size} ranks {share:,}, which {error.reason}"
        raise SettingError(error.field, total, reason) from None


def _typed() -> list[str]:
    """Return the overrides as they were typed: what is in them was resolved once already."""
    typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(typed, list)
    return typed


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except Exception as error:  # resolvers are foreign code
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
        "overrides": _typed(),
    }


def _directory(settings: Settings, of_all_jobs: Sequence[str]) -> Path:
    h, run = HydraConfig.get(), settings.run
    if run.resume not in (None, AUTO):
        return Path(str(run.resume))
    if run.run_dir:
        return Path(run.run_dir)
    if h.mode == RunMode.MULTIRUN:
        whole = Path(h.runtime.output_dir)
        if h.sweep.subdir != ".":  # it was typed
            return whole
        return whole / run_name(h.job.num, _typed(), of_all_jobs)
    if run.resume == AUTO:
        reason = "needs run_dir=… too: the directory to start in, or to continue"
        raise SettingError("resume", AUTO, reason)
    return default_path(run.env.id, settings.agent.name, run.seeds or run.seed)
