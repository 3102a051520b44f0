"""Which jobs of sweeps are the same run: the settings that define a run, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from steadyrl.core.errors import SettingError
from steadyrl.core.safe_parsing import read_yaml
from steadyrl.training.checkpoints.run_directory import CONFIG
from steadyrl.training.config.overrides import ABOUT_THE_RUN, flatten, is_mutable, key_of, set_key
from steadyrl.training.config.settings import completed, load_settings
from steadyrl.training.sweeps.jobs import SweepJob


def counted(values: Mapping[str, Any], swept: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that define a run, by full key.

    Values are converted: 1e5 is 100000. Keys in `swept` always count; keys missing in `values` get
    their defaults.
    """
    found = completed(values)
    with suppress(SettingError):  # invalid: the job itself will report it
        found = load_settings(found).values()
    keys = {
        key: value
        for key, value in flatten(found)
        if key in swept
        or (key not in ABOUT_THE_RUN and (key == "total_steps" or not is_mutable(key)))
    }
    if found.get("init_from") is not None:
        keys["init_from"] = found["init_from"]
    return keys


def digest(keys: Mapping[str, Any]) -> str:
    """Return the hash of settings; of those `counted`, equal for configurations of the same run."""
    text = json.dumps(keys, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def find_known(jobs: Sequence[SweepJob], wanted: Collection[SweepJob]) -> dict[str, SweepJob]:
    """Return jobs by identity; jobs saved without some of today's keys are hashed with defaults."""
    today = {frozenset(job.counted) for job in wanted}
    found: dict[str, SweepJob] = {}
    if {job.identity for job in wanted} - {job.identity for job in jobs}:
        older = [job for job in jobs if frozenset(job.counted) not in today]
        found = {digest(_counted_today(job)): job for job in older}
    return found | {job.identity: job for job in jobs}


def _counted_today(job: SweepJob) -> dict[str, Any]:
    """Return the defining settings of a job planned by an older version, with today's keys."""
    if job.counted:
        values: dict[str, Any] = {}
        for key, value in job.counted.items():
            set_key(values, key, value)
        return counted(values, job.counted)
    try:  # planned before `counted` was saved: read its run's config
        values = read_yaml(Path(job.run_dir) / CONFIG)
    except Exception:  # parser or disk: the run may not exist
        return {"name": job.name}
    typed = {key_of(text) for text in job.overrides}
    return counted(values, typed) if isinstance(values, dict) else {"name": job.name}


def swept_over(batch: Sequence[Sequence[str]]) -> set[str]:
    """Return the keys that take several values in a batch of override lists."""
    values: dict[str, set[str]] = {}
    for text in chain.from_iterable(batch):
        values.setdefault(key_of(text), set()).add(text.partition("=")[2])
    return {key for key, of_it in values.items() if len(of_it) > 1}


def validate_run_dirs(jobs: Iterable[SweepJob]) -> None:
    """Raise SettingError if two jobs have the same run directory."""
    owners: dict[str, SweepJob] = {}
    for job in jobs:
        owner = owners.setdefault(job.run_dir, job)
        if owner is not job:
            reason = f"would be shared by two jobs, {owner.label} and {job.label}; leave it out"
            raise SettingError("run_dir", job.run_dir, reason)
