"""The jobs of a sweep: their settings checked, known ones recognised, new ones named."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from steadyrl.core.errors import CommandError, SettingError
from steadyrl.training.checkpoints.run_directory import absolute
from steadyrl.training.config.job_names import fixed_keys, job_name
from steadyrl.training.config.overrides import key_of, set_key, without_hydra
from steadyrl.training.config.settings import load_settings
from steadyrl.training.sweeps.identity import counted, digest
from steadyrl.training.sweeps.jobs import SweepDirectory, SweepJob


class ComposedJob(NamedTuple):
    """The overrides of a job, without Hydra's own, and the configuration that they compose to."""

    overrides: list[str]
    values: Any
    subdir: str  # hydra.sweep.subdir; "": a directory named after the overrides


def plan(
    place: SweepDirectory, composed: Sequence[ComposedJob], typed: Sequence[str]
) -> list[SweepJob]:
    """Return the jobs of a sweep, each written to its status file; duplicates count once.

    `typed`: the command line, from which directories and labels take only the keys that differ.
    """
    _validate_values(composed)
    shown = without_hydra(typed)
    fixed = fixed_keys(shown)
    swept = swept_over([job.overrides for job in composed])
    fresh = [_new_job(job, swept) for job in composed]
    known = find_known(place.all(), fresh)
    taken = {job.name for job in known.values()}
    jobs: dict[str, SweepJob] = {}
    for number, job in enumerate(fresh):
        if job.identity in jobs:
            continue
        if before := known.get(job.identity):
            job = replace(
                before, overrides=job.overrides, identity=job.identity, counted=job.counted
            )
        else:
            if job.run_dir and composed[number].values.get("resume") is None:
                _validate_is_new(job)
            job.name = job.name or _free_name(number, len(fresh), job.overrides, shown, taken)
            job.run_dir = str(absolute(Path(job.run_dir or place.path / job.name)))
        taken.add(job.name)
        differing = [text for text in job.overrides if key_of(text) not in fixed]
        job.label = " ".join(differing or job.overrides) or job.name
        jobs[job.identity] = job
    validate_run_dirs(jobs.values())
    for at, job in enumerate(jobs.values()):
        job.place = f"{at + 1}/{len(jobs)}"
        if job.status == "running":
            continue  # by another sweep, which writes its status
        if job.status != "finished":
            job.status, job.error = "waiting", None
        place.write(job)
    return list(jobs.values())


def _validate_values(composed: Sequence[ComposedJob]) -> None:
    """Raise CommandError, before any job starts, with a line for each value that is wrong."""
    wrong = [reason for job in composed if (reason := _find_error(job.values))]
    if wrong:
        first, *others = dict.fromkeys(wrong)
        raise CommandError(f"{first} (no job was started)").with_details(*others)


def _find_error(values: Any) -> str | None:
    """Return what is wrong with a value of a job's configuration; None: nothing, or not known."""
    if "${" in json.dumps(values, default=str):  # the job reports what cannot be resolved
        return None
    try:
        load_settings({key: values[key] for key in values if key != "experiment"})
    except SettingError as error:
        return str(error)
    return None


def _validate_is_new(job: SweepJob) -> None:
    """Raise SettingError if the directory that a new job is given holds a run of something else."""
    if job.begun:
        reason = "holds a run already; choose another directory, or continue it: resume=auto"
        raise SettingError("run_dir", job.run_dir, reason)


def _new_job(job: ComposedJob, swept: Collection[str]) -> SweepJob:
    keys = counted(job.values, swept)
    run_dir = str(job.values.get("run_dir") or "")
    return SweepJob(job.subdir, "", job.overrides, digest(keys), run_dir, counted=keys)


def find_known(jobs: Sequence[SweepJob], wanted: Collection[SweepJob]) -> dict[str, SweepJob]:
    """Return the jobs planned before, by identity.

    One planned by another version, with other keys than today's, has two: the second is that of its
    settings with today's keys, absent ones at their defaults.
    """
    known = {job.identity: job for job in jobs}
    if known.keys() >= {job.identity for job in wanted}:
        return known
    todays = {frozenset(job.counted) for job in wanted}
    older = [job for job in jobs if job.counted and frozenset(job.counted) not in todays]
    return {_identity_today(job): job for job in older} | known


def _identity_today(job: SweepJob) -> str:
    values: dict[str, Any] = {}
    for key, value in job.counted.items():
        set_key(values, key, value)
    return digest(counted(values, job.counted))


def swept_over(batch: Sequence[Sequence[str]]) -> set[str]:
    """Return the keys that take several values in a batch of override lists."""
    values: dict[str, set[str]] = {}
    for text in chain.from_iterable(batch):
        values.setdefault(key_of(text), set()).add(text.partition("=")[2])
    return {key for key, texts in values.items() if len(texts) > 1}


def _free_name(
    number: int, total: int, overrides: Sequence[str], shown: Sequence[str], taken: set[str]
) -> str:
    while (name := job_name(number, overrides, shown)) in taken:
        number += total
    return name


def validate_run_dirs(jobs: Iterable[SweepJob]) -> None:
    """Raise SettingError if two jobs have the same run directory."""
    owners: dict[str, SweepJob] = {}
    for job in jobs:
        owner = owners.setdefault(job.run_dir, job)
        if owner is not job:
            reason = f"would be shared by two jobs, {owner.label} and {job.label}; leave it out"
            raise SettingError("run_dir", job.run_dir, reason)
