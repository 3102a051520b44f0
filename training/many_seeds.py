"""`seeds=[0,1,…]`: as many runs of one configuration, one after the other in one process.

What they share is what a process has once: its imports, compiled kernels, and the graph of an
update, which pays sooner for all of them. Each has its own directory, seed-N/ below one, and is
there what it would be alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from agents.network_settings import is_large_image
from agents.registry import Compiling
from envs.types import EnvironmentFailedError
from memory.errors import NonFiniteError, SettingError, describe, one_line, told_lines
from training.child import is_finished
from training.documents import read_yaml
from training.formats import with_keys_of_before
from training.launch import place
from training.manifest import CheckpointError
from training.resume import AUTO, continued, named
from training.run_directory import CONFIG, read_summary
from training.seeds_summary import write_summary
from training.settings import Job, RunSettings
from training.sweep_jobs import SweepJob, progress_line, table
from training.sweep_run import say
from training.typed import show


def each_seed(
    config: DictConfig, run: RunSettings, directory: Path, typed: Sequence[str], *, again: bool
) -> Iterator[DictConfig]:
    """Yield the configuration of each run that is left, or refuse all of them.

    With `again`, as with resume=…, those that were begun are continued.
    """
    assert run.seeds is not None
    _check_consistency(run.seeds, typed)
    again = again or run.resume is not None
    begun = [seed for seed in run.seeds if (_folder(directory, seed) / CONFIG).exists()]
    if (directory / CONFIG).exists():
        reason = "holds a run of its own; choose another directory"
        raise SettingError("run_dir", directory, reason)
    if begun and not again:
        reason = f"holds runs of seeds={show(begun)}; continue them with resume=auto"
        raise SettingError("run_dir", directory, f"{reason}, or choose another directory")
    if run.resume not in (None, AUTO) and not begun:
        raise CheckpointError(f"resume={run.resume}: holds no run of seeds={show(run.seeds)}")
    length = run.total_steps if named(typed, ["total_steps"]) else 0
    for seed in run.seeds:
        folder, own = _folder(directory, seed), deepcopy(config)
        own.seed, own.seeds, own.run_dir = seed, None, str(folder)
        own.resume = AUTO if again else None
        summary = read_summary(folder)
        if not (again and is_finished(summary) and summary.get("steps", 0) >= length):
            yield own
        elif seed in begun:
            _refuse_another(folder / CONFIG, own, typed)


def _refuse_another(file: Path, own: DictConfig, typed: Sequence[str]) -> None:
    """Refuse a run that is over and was made with other settings: it is no seed of these."""
    try:
        stored = read_yaml(file)
        if not isinstance(stored, dict):
            raise ValueError("holds no keys")
    except Exception as error:  # of the parser, of the disk: the file may hold anything
        raise CheckpointError(f"{file}: cannot be read: {describe(error)}") from error
    continued(with_keys_of_before(stored), _plain(own), typed)


def _plain(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _folder(directory: Path, seed: int) -> Path:
    return directory / f"seed-{seed}"


def _keys(typed: Sequence[str]) -> set[str]:
    return {text.partition("=")[0].lstrip("+~") for text in typed}


def _check_consistency(seeds: Sequence[int], typed: Sequence[str]) -> None:
    if "seed" in _keys(typed):
        raise SettingError("seeds", show(seeds), "cannot be combined with seed=…: leave one out")
    if place().size > 1:
        reason = "cannot be combined with torchrun: these are many runs, ranks are one"
        raise SettingError("seeds", show(seeds), reason)


class ManySeeds(NamedTuple):
    """Runs that differ in their seed only, below one directory; those without a job are done."""

    directory: Path
    seeds: tuple[int, ...]
    jobs: list[Job]
    typed: Sequence[str]

    def train(self, train: Callable[[Job], float | None]) -> float | None:
        """Train one after the other; return their mean score.

        One that diverges, or whose environments fail, is over, and the others go on.
        """
        told = {seed: _account(_folder(self.directory, seed), seed) for seed in self.seeds}
        jobs = {job.settings.run.seed: job for job in one_graph(self.jobs, len(self.seeds))}
        for seed in jobs:
            told[seed].status = "waiting"
        try:
            for at, (seed, account) in enumerate(told.items()):
                if seed not in jobs:
                    say(f"{account.label}: finished before, in {account.run_dir}")
                    continue
                label = f"{account.label} ({at + 1}/{len(told)})"
                say(f"{label}, one after the other in this process")
                _run(jobs[seed]._replace(label=label), account, train)
                write_summary(self.directory, list(told.values()))
                say(progress_line(list(told.values())).replace("sweep", "seeds", 1))
        finally:
            self._report(list(told.values()))
        unfinished = [account for account in told.values() if account.status != "finished"]
        if unfinished:
            from training.sweeper import UnfinishedError  # with Hydra's plugins

            raise UnfinishedError(unfinished, len(told))
        scores = [account.score for account in told.values() if account.score is not None]
        return fmean(scores) if len(scores) == len(told) else None

    def _report(self, told: Sequence[SweepJob]) -> None:
        """Write the summary of all, and say how each went and how to go on; unless none began."""
        if not any(account.begun for account in told):
            return
        write_summary(self.directory, told)
        say(f"\n{table(told)}\n")
        if any(account.status != "finished" for account in told):
            own = [text for text in self.typed if not _keys([text]) & {"run_dir", "resume"}]
            again = shlex.join([*own, f"run_dir={self.directory}", "resume=auto"])
            say(f"rest:   python train.py {again}")
        say(f"runs:   {self.directory}")
        say(f"curves: tensorboard --logdir {shlex.quote(str(self.directory))}")


def _account(folder: Path, seed: int) -> SweepJob:
    account = SweepJob(folder.name, f"seed={seed}", [], "", str(folder))
    return _looked_up(account) if account.begun else account


def _looked_up(account: SweepJob) -> SweepJob:
    """Take over what a run says of itself."""
    summary = read_summary(Path(account.run_dir))
    account.status = summary.get("status", "killed")
    account.score, account.seconds = summary.get("eval_return_mean"), summary.get("wall_seconds")
    return account


def _run(job: Job, account: SweepJob, train: Callable[[Job], float | None]) -> None:
    account.status = "running"
    try:
        train(job)
    except (NonFiniteError, EnvironmentFailedError) as error:
        if not account.begun:  # nor would the others
            raise
        account.error, account.exit_code = one_line(str(error)), error.exit_code
        say("\n".join(told_lines(error)))
    finally:
        account.status = "waiting"
        if account.begun:
            _looked_up(account)


def one_graph(jobs: list[Job], many: int) -> list[Job]:
    """Let runs that begin compile their updates where that pays for so `many` runs together.

    The graph is compiled for the first of them; the others find it.
    """
    new = [job for job in jobs if job.continues is None]
    agent = new[0].settings.agent if new else None
    if not isinstance(agent, Compiling) or agent.compile != "auto":
        return jobs
    import torch  # slow, like what follows

    from agents.compiling import compile_mode
    from training.device_choice import choose_device

    run, spec = new[0].settings.run, new[0].spec
    device, large = torch.device(choose_device(run, agent, spec)), is_large_image(spec.seen_shape)
    updates = agent.expected_updates(spec, run.total_steps)
    alone, together = (
        compile_mode("auto", device, each, large_images=large) for each in (updates, many * updates)
    )
    if alone == together:
        return jobs
    say(f"updates: {many * updates:,} of all seeds, which one graph pays for: agent.compile=true")
    return [job if job.continues is not None else _compiling(job) for job in jobs]


def _compiling(job: Job) -> Job:
    agent = replace(job.settings.agent, compile="true")  # type: ignore[type-var]
    config = {**job.config, "agent": {**job.config["agent"], "compile": "true"}}
    return job._replace(settings=replace(job.settings, agent=agent), config=config)
