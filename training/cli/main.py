"""From the command line to an accepted job; every error is one line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from steadyrl.core.clock import doing
from steadyrl.core.command.parent import end_with_parent
from steadyrl.core.errors import (
    CommandError,
    ExpectedError,
    SettingError,
    error_lines,
    exit_on_error,
    exit_with,
    interrupt_kept,
)
from steadyrl.training.cli.arguments import Arguments, help_text, read, version
from steadyrl.training.cli.failures import one_line_errors, out_of_memory
from steadyrl.training.config.hints.explain import explain
from steadyrl.training.config.hints.keys import also_unknown
from steadyrl.training.config.settings import CONFIGS, Job
from steadyrl.training.logging.terminal import safe_stdout
from steadyrl.training.run.job import accept, compose_one
from steadyrl.training.run.rank_info import rank_info
from steadyrl.training.sweeps.seed_jobs import accept_seeds

if TYPE_CHECKING:
    from steadyrl.training.run.services import RunResult
    from steadyrl.training.sweeps.jobs import SweepJob


class ForgetConfigurations(Callback):
    """Hydra callback that frees the configurations of finished jobs during a sweep."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Drop the configurations that Hydra would keep in the job's result."""
        job_return.cfg = job_return.hydra_cfg = None


@exit_on_error()
def main(train: Callable[[Job], RunResult]) -> None:
    """Compose and check the configuration, train, and exit with the run's exit code."""
    arguments = read(sys.argv[1:])
    if arguments.wants_help:
        with safe_stdout():
            print(help_text(), end="")
    elif arguments.wants_version:
        with safe_stdout():
            print(version())
    else:
        compose_and_train(train, arguments)


@contextmanager
def _shown_probing() -> Iterator[None]:
    """Show that the environment is built to read its spaces, which may take long."""
    from steadyrl.training.logging.screen import displayed, find_screen

    display = displayed(find_screen(), total=0, silent=rank_info().rank > 0)
    with display, doing("looking at the environment"):
        yield


class Task:
    """The task function that Hydra calls with each composed configuration."""

    def __init__(self, train: Callable[[Job], RunResult], arguments: Arguments) -> None:
        self._train, self._arguments = train, arguments

    def __call__(self, config: DictConfig) -> float | None:
        """Train once; exit on failure, unless in a sweep, which continues."""
        if not self._arguments.multirun:
            try:
                return self._attempt(config)
            except ExpectedError as error:
                exit_with(error)
        from steadyrl.training.sweeps.job_run import current, run_job, say

        found = current(HydraConfig.get().sweep.dir)
        if found is None:  # of another sweeper, which raises this error at its end
            return self._attempt(config)
        options = [option for option in self._arguments.options if option != "--multirun"]
        try:
            return run_job(*found, lambda: self._attempt(config, found[1]), options)
        except ExpectedError as error:  # of the sweep's files; Hydra would say nothing
            say("\n".join(error_lines(error)))
            raise

    def _attempt(self, config: DictConfig, sweep_job: SweepJob | None = None) -> float | None:
        many = OmegaConf.is_interpolation(config, "seeds") or config.get("seeds") is not None
        with one_line_errors():
            if many:
                from steadyrl.training.sweeps.seeds import ManySeeds

                typed = self._arguments.overrides
                seeds = ManySeeds(*accept_seeds(config, typed, sweep_job), typed)
            else:
                overrides = self._arguments.overrides
                job = accept(config, overrides, sweep_job, probing=_shown_probing())
        return seeds.train(self._train_one) if many else self._train_one(job)

    def _train_one(self, job: Job) -> float | None:
        """Return the score, which sweeps maximise; exit with the run's code if it is not 0."""
        with one_line_errors(job):
            result = self._train(job)
        if result.exit_code:
            sys.exit(result.exit_code)
        return result.score


def compose_and_train(train: Callable[[Job], RunResult], arguments: Arguments) -> None:
    """Let Hydra compose one job, or the jobs of a sweep, and train each."""
    if rank_info().size > 1:
        if not end_with_parent(signal.SIGTERM, os.getppid()):  # no rank outlives its launcher
            os.kill(os.getpid(), signal.SIGTERM)
        if arguments.multirun:
            raise CommandError(
                "--multirun and torchrun cannot be combined: torchrun's ranks are one run; "
                "start torchrun once per run"
            )
    task = Task(train, arguments)
    # Otherwise Hydra prints its own errors over several lines and exits with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with composing(arguments):
        if arguments.plain:
            config = compose_one(arguments.overrides)
        else:
            with safe_stdout() if arguments.prints else nullcontext():
                run_hydra(task, arguments)
            return
    task(config)


@contextmanager
def composing(arguments: Arguments) -> Iterator[None]:
    """Convert errors of composing the configuration to one line with a hint."""
    try:
        with interrupt_kept():
            yield
    except ExpectedError:
        raise
    except Exception as error:  # `Task` raises expected errors only: this one is from composing
        full = out_of_memory(error)
        if full is not None:
            raise full from error
        sweep = arguments.multirun
        typed, presets = arguments.overrides, arguments.presets
        reason = explain(error, typed, multirun=sweep, presets=presets)
        others = also_unknown(reason, typed, presets)
        raise CommandError(reason).with_details(*others) from error


def run_hydra(task: Callable[[DictConfig], float | None], arguments: Arguments) -> None:
    """Run Hydra's own command line: a sweep, or printing the configuration."""
    typed = sys.argv
    try:
        sys.argv = [*typed[:1], *arguments.options, *arguments.overrides]
        if arguments.multirun:
            from steadyrl.training.sweeps.sweeper import install

            install()
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")(task)()
    except SystemExit as end:
        # Hydra exits with 1 after printing its error; exit code 1 is reserved for bugs.
        sys.exit(SettingError.exit_code if end.code == 1 and arguments.prints else end.code)
    finally:
        sys.argv = typed
