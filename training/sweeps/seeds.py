"""`seeds=[0,1,…]`: train one configuration with several seeds, in sequence in one process.

The runs share imports, compiled kernels and the compiled update, whose compilation pays off
sooner. Each has its own directory seed-N/ and the results of a separate run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from steadyrl.agents.networks.settings import is_large_image
from steadyrl.agents.registry import SupportsCompile
from steadyrl.core.errors import NonFiniteError, SettingError, describe, error_lines, one_line
from steadyrl.core.files import write_atomic
from steadyrl.core.safe_parsing import read_yaml
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.checkpoints.run_directory import (
    CONFIG,
    SUMMARY,
    absolute,
    read_summary,
    validate_no_links,
)
from steadyrl.training.config.overrides import (
    AUTO,
    as_override,
    key_of,
    merge_overrides,
    overridden_keys,
)
from steadyrl.training.config.schema import show
from steadyrl.training.config.settings import Job, RunSettings
from steadyrl.training.run.job import (
    accept,
    resolved,
    run_directory_of,
    typed_overrides,
    valid_settings,
)
from steadyrl.training.run.rank_info import rank_info
from steadyrl.training.sweeps.job_run import report_end, say, validate_finished
from steadyrl.training.sweeps.jobs import SweepJob
from steadyrl.training.sweeps.progress import progress_line, table
from steadyrl.training.sweeps.subprocess_run import is_finished

SCORES = ("eval_return", "return")

TOGETHER = ("agent", "env")

EACH = ("seed", "status", "steps", "return_mean", "eval_return_mean", "weights_sha256")


def write_summary(directory: Path, records: Sequence[SweepJob]) -> None:
    """Write a summary of all seeds' runs; a write error is only a warning."""
    found = [read_summary(Path(record.run_dir)) for record in records if record.begun]
    ended = [summary for summary in found if summary]
    whole: dict[str, Any] = {"status": _status(records), "run_dir": str(directory)}
    for key in TOGETHER:
        whole[key] = next((summary.get(key) for summary in ended), None)
    whole["seeds"] = [int(record.name.removeprefix("seed-")) for record in records]
    for name in SCORES:
        known = [v for s in ended if (v := s.get(f"{name}_mean")) is not None]
        whole[f"{name}_mean"] = fmean(known) if known else None
        whole[f"{name}_std"] = pstdev(known) if known else None  # across seeds
    whole["wall_seconds"] = sum(summary.get("wall_seconds") or 0.0 for summary in ended)
    whole["runs"] = [{key: summary.get(key) for key in EACH} for summary in ended]
    try:
        write_atomic(directory / SUMMARY, json.dumps(whole, indent=2) + "\n")
    except OSError as error:
        say(f"warning: cannot write summary.json: {error.strerror or error}")


def _status(records: Sequence[SweepJob]) -> str:
    """Return `finished` if all runs are; else `interrupted` or the first other status."""
    others = [record.status for record in records if record.status != "finished"]
    if set(others) & {"waiting", "running", "killed", "interrupted"}:
        return "interrupted"
    return others[0] if others else "finished"


def configs_per_seed(
    config: DictConfig, run: RunSettings, directory: Path, typed: Sequence[str], *, again: bool
) -> Iterator[DictConfig]:
    """Yield the configuration of each unfinished run; raise if the runs cannot start.

    With `again` (resume=…), existing runs are resumed.
    """
    assert run.seeds is not None
    _check_consistency(run.seeds, typed)
    again = again or run.resume is not None
    begun = [seed for seed in run.seeds if (_folder(directory, seed) / CONFIG).exists()]
    if (directory / CONFIG).exists():
        reason = "contains a run; choose another directory"
        raise SettingError("run_dir", directory, reason)
    if begun and not again:
        reason = f"contains runs of seeds={show(begun)}; resume them with resume=auto"
        raise SettingError("run_dir", directory, f"{reason}, or choose another directory")
    if run.resume not in (None, AUTO) and not begun:
        raise CheckpointError(f"resume={run.resume}: no run of seeds={show(run.seeds)}")
    length = run.total_steps if overridden_keys(typed, ["total_steps"]) else 0
    for seed in run.seeds:
        folder, own = _folder(directory, seed), deepcopy(config)
        own.seed, own.seeds, own.run_dir = seed, None, str(folder)
        own.resume = AUTO if again else None
        if not (again and _is_done(folder, length)):
            yield own
        elif seed in begun:
            # Refuses other settings.
            merge_overrides(_stored(folder / CONFIG), resolved(own), typed)


def _is_done(folder: Path, length: int) -> bool:
    """Return whether a run is finished: after `length` steps, or by a callback that ended it."""
    summary = read_summary(folder)
    if not is_finished(summary):
        return False
    planned = _stored(folder / CONFIG).get("total_steps") if summary.get("stopped_by") else None
    return max(summary.get("steps") or 0, planned if isinstance(planned, int) else 0) >= length


def _stored(file: Path) -> dict[str, Any]:
    """Return the configuration of a run."""
    try:
        stored = read_yaml(file)
        if not isinstance(stored, dict):
            raise ValueError("is no mapping of keys")
    except Exception as error:  # disk or parser: the file may contain anything
        raise CheckpointError(f"{file}: cannot be read: {describe(error)}") from error
    return stored


def _folder(directory: Path, seed: int) -> Path:
    return directory / f"seed-{seed}"


def _check_consistency(seeds: Sequence[int], typed: Sequence[str]) -> None:
    if "seed" in map(key_of, typed):
        raise SettingError("seeds", show(seeds), "cannot be combined with seed=…: leave one out")
    if rank_info().size > 1:
        reason = "cannot be combined with torchrun, whose ranks are one run"
        raise SettingError("seeds", show(seeds), reason)


class ManySeeds(NamedTuple):
    """Runs that differ in the seed only; `jobs` are the unfinished ones."""

    directory: Path
    seeds: tuple[int, ...]
    jobs: list[Job]
    typed: Sequence[str]

    def train(self, train: Callable[[Job], float | None]) -> float | None:
        """Train the runs in sequence; return their mean score.

        A run that diverges or whose environments fail is recorded; the others continue.
        """
        records = {seed: _record(_folder(self.directory, seed), seed) for seed in self.seeds}
        jobs = {
            job.settings.run.seed: job for job in compile_if_worthwhile(self.jobs, len(self.seeds))
        }
        for seed in jobs:
            records[seed].status = "waiting"
        try:
            for at, (seed, record) in enumerate(records.items()):
                if seed not in jobs:
                    say(f"{record.label}: finished before, in {record.run_dir}")
                    continue
                label = f"{record.label} ({at + 1}/{len(records)})"
                say(f"{label}, in sequence in this process")
                _run(jobs[seed]._replace(label=label), record, train)
                write_summary(self.directory, list(records.values()))
                say(progress_line(list(records.values())).replace("sweep", "seeds", 1))
        finally:
            self._report(list(records.values()))
        validate_finished(list(records.values()))
        scores = [record.score for record in records.values() if record.score is not None]
        return fmean(scores) if len(scores) == len(records) else None

    def _report(self, records: Sequence[SweepJob]) -> None:
        """Write the summary, print the table and the command to resume; skip it if none started."""
        if not any(record.begun for record in records):
            return
        write_summary(self.directory, records)
        files = f"runs:   {self.directory}"
        settings = next((job.settings.run.report for job in self.jobs), None)
        if settings is not None and (settings.at_end or settings.every):
            from steadyrl.training.report.writer import write_group  # slow import

            files += f"\nreport: {found}" if (found := write_group(self.directory)) else ""
        own = [text for text in self.typed if key_of(text) not in ("run_dir", "resume")]
        report_end(
            f"{table(records)}\n",
            records,
            resume=[*own, as_override("run_dir", str(self.directory)), "resume=auto"],
            files=files,
            directory=self.directory,
            hydra=HydraConfig.get(),
        )


def _record(folder: Path, seed: int) -> SweepJob:
    record = SweepJob(folder.name, f"seed={seed}", [], "", str(folder))
    return _update_from_summary(record) if record.begun else record


def _update_from_summary(record: SweepJob) -> SweepJob:
    """Copy status, score and seconds from a run's summary."""
    summary = read_summary(Path(record.run_dir))
    record.status = summary.get("status", "killed")
    record.score, record.seconds = summary.get("eval_return_mean"), summary.get("wall_seconds")
    return record


def _run(job: Job, record: SweepJob, train: Callable[[Job], float | None]) -> None:
    record.status = "running"
    try:
        train(job)
    except (NonFiniteError, EnvironmentFailedError) as error:
        if not record.begun:  # the others would fail alike
            raise
        record.error, record.exit_code = one_line(str(error)), error.exit_code
        say("\n".join(error_lines(error)))
    finally:
        record.status = "waiting"
        if record.begun:
            _update_from_summary(record)


def compile_if_worthwhile(jobs: list[Job], many: int) -> list[Job]:
    """Enable agent.compile for new runs if compilation pays off for `many` runs together.

    The first run compiles the graph; the others find it in the cache.
    """
    new = [job for job in jobs if job.continues is None]
    agent = new[0].settings.agent if new else None
    if not isinstance(agent, SupportsCompile) or agent.compile != "auto":
        return jobs
    import torch  # slow imports

    from steadyrl.agents.engine.engine import compile_mode
    from steadyrl.training.run.hardware import choose_device

    run, spec = new[0].settings.run, new[0].spec
    device = torch.device(choose_device(run, agent, spec))
    large = is_large_image(spec.unmasked_shape)
    updates = agent.expected_updates(spec, run.total_steps)
    alone, together = (
        compile_mode("auto", device, each, large_images=large) for each in (updates, many * updates)
    )
    if alone == together:
        return jobs
    say(f"agent.compile=true: one graph serves the {many * updates:,} updates of all seeds")
    return [job if job.continues is not None else _compiling(job) for job in jobs]


def _compiling(job: Job) -> Job:
    agent = replace(job.settings.agent, compile="true")  # type: ignore[type-var]
    config = {**job.config, "agent": {**job.config["agent"], "compile": "true"}}
    return job._replace(settings=replace(job.settings, agent=agent), config=config)


def accept_seeds(
    config: DictConfig, of_all_jobs: Sequence[str], of_sweep: SweepJob | None
) -> tuple[Path, tuple[int, ...], list[Job]]:
    """Accept one job per seed; return their directory, all seeds, and the unfinished jobs."""
    settings = valid_settings(resolved(config))
    if of_sweep is None:
        directory = absolute(run_directory_of(settings, of_all_jobs))
    else:
        directory = Path(of_sweep.run_dir)
    validate_no_links(directory)
    again = of_sweep is not None and of_sweep.begun
    configs = configs_per_seed(config, settings.run, directory, typed_overrides(), again=again)
    return directory, settings.run.seeds or (), [accept(each) for each in configs]
