"""`seeds=[0,1,…]`: train one configuration with several seeds, in sequence in one process.

The runs share imports, compiled kernels and the compiled update, whose compilation pays off
sooner. Each has its own directory seed-N/ and the results of a separate run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig

from steadyrl.core.errors import MemoryBudgetError, NonFiniteError, error_lines
from steadyrl.core.files import write_atomic
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.training.checkpoints.run_directory import SUMMARY, read_summary
from steadyrl.training.config.overrides import as_override, key_of
from steadyrl.training.config.settings import Job
from steadyrl.training.sweeps.job_run import report_end, say, validate_finished
from steadyrl.training.sweeps.jobs import SweepJob
from steadyrl.training.sweeps.progress import progress_line, table
from steadyrl.training.sweeps.seed_jobs import compile_if_worthwhile, seed_folder

# Keys of a run's summary: the mean and spread over seeds, one for all runs, and those of each run.
SCORES = ("eval_return", "return")
COMMON_KEYS = ("agent", "env")
PER_RUN = ("seed", "status", "steps", "return_mean", "eval_return_mean", "weights_sha256")


def write_summary(directory: Path, records: Sequence[SweepJob]) -> None:
    """Write a summary of all seeds' runs; a write error is only a warning."""
    found = [read_summary(Path(record.run_dir)) for record in records if record.begun]
    ended = [summary for summary in found if summary]
    whole: dict[str, Any] = {"status": _status(records), "run_dir": str(directory)}
    for key in COMMON_KEYS:
        whole[key] = next((summary.get(key) for summary in ended), None)
    whole["seeds"] = [int(record.name.removeprefix("seed-")) for record in records]
    finished = [summary for summary in ended if summary.get("status") == "finished"]
    for name in SCORES:  # means of the same runs: those that finished, if any did
        known = [v for s in finished or ended if (v := s.get(f"{name}_mean")) is not None]
        whole[f"{name}_mean"] = fmean(known) if known else None
        whole[f"{name}_std"] = pstdev(known) if known else None  # across seeds
    whole["wall_seconds"] = sum(summary.get("wall_seconds") or 0.0 for summary in ended)
    whole["runs"] = [{key: summary.get(key) for key in PER_RUN} for summary in ended]
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
        records = {seed: _record(seed_folder(self.directory, seed), seed) for seed in self.seeds}
        jobs = {
            job.settings.run.seed: job for job in compile_if_worthwhile(self.jobs, len(self.seeds))
        }
        for seed in jobs:
            records[seed].status = "waiting"
        higher: tuple[str, ...] = ()
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
        except MemoryBudgetError as error:
            higher = error.overrides
            raise
        finally:
            self._report(list(records.values()), higher)
        validate_finished(list(records.values()))
        scores = [record.score for record in records.values() if record.score is not None]
        return fmean(scores) if len(scores) == len(records) else None

    def _report(self, records: Sequence[SweepJob], higher: Sequence[str]) -> None:
        """Write the summary, print the table and the command to resume; skip it if none started.

        `higher`: the memory limit to resume with, if one ended the runs.
        """
        if not any(record.begun for record in records):
            return
        write_summary(self.directory, records)
        files = f"runs:   {self.directory}"
        settings = next((job.settings.run.report for job in self.jobs), None)
        if settings is not None and (settings.at_end or settings.every):
            from steadyrl.training.report.writer import write_group  # slow import

            files += f"\nreport: {found}" if (found := write_group(self.directory)) else ""
        replaced = ("run_dir", "resume", *map(key_of, higher))
        own = [text for text in self.typed if key_of(text) not in replaced]
        report_end(
            f"{table(records)}\n",
            records,
            resume=[*own, *higher, as_override("run_dir", str(self.directory)), "resume=auto"],
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
        record.error, record.exit_code = error.line, error.exit_code
        say("\n".join(error_lines(error)))
    finally:
        record.status = "waiting"
        if record.begun:
            _update_from_summary(record)
