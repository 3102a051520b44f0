"""Hydra sweeper that can be resumed: skips finished jobs and continues after failed ones.

Launchers are Hydra's. The basic launcher runs jobs in this process; any other runs each job in a
subprocess (`training/sweeps/job_run.py`), whose lines are prefixed by the job's label.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import basic_sweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from steadyrl.core.errors import describe
from steadyrl.memory.gpu.cards import AT_ONCE
from steadyrl.memory.process import usable_cores
from steadyrl.training.checkpoints.run_directory import absolute
from steadyrl.training.config.overrides import as_override, without_hydra
from steadyrl.training.run.signals import StoppedError
from steadyrl.training.sweeps.job_run import (
    NAME,
    OWNER,
    STOP,
    THREADS,
    report_end,
    say,
    validate_finished,
)
from steadyrl.training.sweeps.jobs import JOBS, SWEEP, SweepDirectory, SweepError, SweepJob
from steadyrl.training.sweeps.plan import ComposedJob, plan
from steadyrl.training.sweeps.progress import progress_line, table
from steadyrl.training.sweeps.subprocess_run import quoted
from steadyrl.training.sweeps.watch import forward_signals, show_progress


def install() -> None:
    """Replace Hydra's basic sweeper, which stops at the first failing job."""
    # Looked up here: Hydra re-imports plugin modules when it scans them.
    name = f"{basic_sweeper.__name__}.BasicSweeper"
    Plugins.instance().class_name_to_class[name] = ResumableSweeper


class ResumableSweeper(Sweeper):
    """Runs every job of a sweep that has not finished yet."""

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None = None) -> None:
        self._batch_size, self._params = max_batch_size, params or {}
        self._launcher: Launcher | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Instantiate the configured launcher."""
        self.config, self.hydra_context = config, hydra_context
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Any]:
        """Plan the jobs, launch the unfinished ones and report."""
        assert self.config is not None
        typed = [*(f"{key}={value}" for key, value in self._params.items()), *arguments]
        assert self.hydra_context is not None  # Hydra has set it up
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)  # for globs
        parsed = parser.parse_overrides(typed)
        [batch] = basic_sweeper.BasicSweeper.split_arguments(parsed, None)
        place = SweepDirectory(absolute(Path(self.config.hydra.sweep.dir), "hydra.sweep.dir"))
        place.write_file(place.path / "multirun.yaml", OmegaConf.to_yaml(self.config))
        with place.planning():
            composed = [self._compose(overrides, number) for number, overrides in enumerate(batch)]
            jobs = plan(place, composed, typed)
        names = [job.name for job in jobs]
        left = [job for job in jobs if not place.is_done(job)]
        for job in jobs:
            if job not in left:
                say(f"job {job.place}: {job.label}: finished before, in {job.run_dir}")
        began = time.monotonic()
        since = " since it was resumed" if any(job.begun for job in jobs) else ""
        try:
            if self.config.hydra.launcher._target_.endswith(".BasicLauncher"):
                self._one_by_one(place, left, names)
            elif left:
                self._side_by_side(place, left, names)
        finally:
            # Nothing of a job stays in memory: the report reads the status files.
            took = f"{time.monotonic() - began:.0f} s{since}"
            ended = _report(place, names, typed, took, self.config.hydra)
        validate_finished(ended)
        return []

    def _compose(self, overrides: Sequence[str], number: int) -> ComposedJob:
        assert self.config is not None and self.hydra_context is not None
        loader = self.hydra_context.config_loader
        config = loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)
        try:
            subdir = str(config.hydra.sweep.subdir)
            del config.hydra
            try:
                values = OmegaConf.to_container(config, resolve=True)
            except Exception:  # resolvers are user code: the job itself will report the error
                values = OmegaConf.to_container(config, resolve=False)
        finally:
            HydraConfig.instance().cfg = before
        return ComposedJob(without_hydra(overrides), values, "" if subdir == "." else subdir)

    def _one_by_one(
        self, place: SweepDirectory, left: Sequence[SweepJob], names: Sequence[str]
    ) -> None:
        for at, job in enumerate(left):
            self._launch([job], at)
            if not at:
                _grow_intern_table()
            say(progress_line(place.named(names)))

    def _side_by_side(
        self, place: SweepDirectory, left: Sequence[SweepJob], names: Sequence[str]
    ) -> None:
        assert self.config is not None  # Hydra has set it up
        stop = place.path / JOBS / f"stop-{os.getpid()}"
        stop.unlink(missing_ok=True)  # of a process that had this number, as in a container
        at_once = self._at_once(len(left))
        launcher = self.config.hydra.launcher._target_
        with (
            env_override(worker_variables(launcher, stop, at_once)),
            forward_signals(place, names, stop, detached=is_detached(launcher)) as received,
            show_progress(place, names, at_once),
        ):
            while left:
                try:
                    size = self._batch_size or len(left)
                    for at in range(0, len(left), size):
                        self._launch(left[at : at + size], at)
                    break
                except Exception as error:  # a worker was killed: relaunch its waiting jobs
                    before = len(left)
                    left = [
                        job
                        for job in place.named(names)
                        if job.status == "waiting" and job.name in {each.name for each in left}
                    ]
                    if len(left) == before:
                        raise SweepError(
                            f"the launcher cannot be used: {describe(error)}"
                        ) from error
                    if received:
                        break
                    say(f"the launcher failed ({describe(error)}); relaunching {len(left)} jobs")
        stop.unlink(missing_ok=True)
        if received:
            raise StoppedError(received[0])

    def _launch(self, jobs: Sequence[SweepJob], first: int) -> None:
        assert self._launcher is not None
        with_names = [
            [*job.overrides, f"++hydra.job.env_set.{NAME}={quoted(job.name)}"] for job in jobs
        ]
        self._launcher.launch(with_names, initial_job_idx=first)

    def _at_once(self, jobs: int) -> int:
        """Return how many jobs run in parallel on this machine."""
        assert self.config is not None
        many = OmegaConf.select(self.config, "hydra.launcher.n_jobs", default=None)
        if many is None:
            return jobs
        many = int(many)
        return min(jobs, many if many > 0 else max(1, usable_cores() + 1 + many))


def is_detached(launcher: str) -> bool:
    """Return whether jobs outlive the sweep and have machines, cores and cards of their own."""
    return launcher.endswith(".SlurmLauncher")


def worker_variables(launcher: str, stop: Path, at_once: int) -> dict[str, str]:
    """Return the environment variables that a launcher passes on to its workers."""
    variables = {STOP: str(stop)}
    if not is_detached(launcher):
        variables[THREADS] = str(max(1, usable_cores() // at_once))
    if ".joblib_launcher." in launcher:
        variables |= {OWNER: str(os.getpid()), AT_ONCE: str(at_once)}
    return variables


def _grow_intern_table() -> None:
    """Grow Python's table of interned strings now, by 2 MB, and not in the middle of a sweep.

    Paths intern their parts, so every job adds some; growth would look like a leak.
    """
    names = [sys.intern(f"steadyrl-{number}") for number in range(60_000)]
    del names


def _report(
    place: SweepDirectory, names: Sequence[str], typed: Sequence[str], took: str, hydra: Any
) -> list[SweepJob]:
    """Write sweep.json, print the table and the command to resume; return this command's jobs."""
    for job in place.named(names):
        if job.status != "running":  # by another sweep, which writes its status
            place.write(job)
    everything = place.collect(names)
    own = [job for job in everything if job.name in set(names)]
    chosen: Any = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
    again = [
        text  # such as hydra/launcher=…
        for text in (*chosen, *typed)
        if not text.startswith(("hydra.sweep.dir=", "hydra.mode="))
    ]
    report_end(
        f"{table(everything)}\n\n{progress_line(own)}, {took}",
        own,
        resume=["-m", *again, as_override("hydra.sweep.dir", str(place.path))],
        files=f"sweep:  {place.path / SWEEP}",
        directory=place.path,
        hydra=hydra,
    )
    return own
