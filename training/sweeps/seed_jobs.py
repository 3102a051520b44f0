"""The jobs of `seeds=[0,1,…]`: which runs are new, continue or are finished, and their settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from steadyrl.agents.networks.settings import is_large_image
from steadyrl.agents.registry import SupportsCompile
from steadyrl.core.errors import SettingError, describe, show
from steadyrl.core.safe_parsing import read_yaml
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    manifest_metadata,
    saved_below,
)
from steadyrl.training.checkpoints.resume import stored_config, too_short
from steadyrl.training.checkpoints.run_directory import (
    CHECKPOINTS,
    CONFIG,
    REPLACED_BY_SEEDS,
    absolute,
    read_summary,
    validate_no_links,
    validate_nothing_lost,
)
from steadyrl.training.config.overrides import AUTO, key_of, merge_overrides, overridden_keys
from steadyrl.training.config.settings import Job, RunSettings
from steadyrl.training.run.job import (
    accept,
    resolved,
    run_directory_of,
    typed_overrides,
    valid_settings,
)
from steadyrl.training.run.rank_info import rank_info
from steadyrl.training.sweeps.job_run import say
from steadyrl.training.sweeps.jobs import SweepJob
from steadyrl.training.sweeps.subprocess_run import is_finished


def accept_seeds(
    config: DictConfig, sweep_overrides: Sequence[str], sweep_job: SweepJob | None
) -> tuple[Path, tuple[int, ...], list[Job]]:
    """Accept one job per seed; return their directory, all seeds, and the unfinished jobs."""
    settings = valid_settings(resolved(config))
    if sweep_job is None:
        directory = absolute(run_directory_of(settings, sweep_overrides))
    else:
        directory = Path(sweep_job.run_dir)
    validate_no_links(directory)
    again = sweep_job is not None and sweep_job.begun
    configs = configs_per_seed(config, settings.run, directory, typed_overrides(), again=again)
    return directory, settings.run.seeds or (), [accept(each) for each in configs]


def configs_per_seed(
    config: DictConfig, run: RunSettings, directory: Path, typed: Sequence[str], *, again: bool
) -> Iterator[DictConfig]:
    """Yield the configuration of each unfinished run; raise if the runs cannot start.

    With `again` (resume=…), existing runs are resumed.
    """
    assert run.seeds is not None
    _validate_seeds(run.seeds, typed)
    again = again or run.resume is not None
    begun = [seed for seed in run.seeds if (seed_folder(directory, seed) / CONFIG).exists()]
    if (directory / CONFIG).exists():
        reason = "contains a run; choose another directory"
        raise SettingError("run_dir", directory, reason)
    if begun and not again:
        reason = f"contains runs of seeds={show(begun)}; resume them with resume=auto"
        raise SettingError("run_dir", directory, f"{reason}, or choose another directory")
    if not any(directory.glob(f"seed-*/{CONFIG}")):
        validate_nothing_lost(directory, REPLACED_BY_SEEDS)
    if run.resume not in (None, AUTO) and not begun:
        raise CheckpointError(f"resume={run.resume}: no run of seeds={show(run.seeds)}")
    length = run.total_steps if overridden_keys(typed, ["total_steps"]) else 0
    for seed in run.seeds:
        folder, job_config = seed_folder(directory, seed), deepcopy(config)
        job_config.seed, job_config.seeds, job_config.run_dir = seed, None, str(folder)
        job_config.resume = AUTO if again else None
        stored = _stored(folder) if seed in begun else {}
        if stored.get("seed", seed) != seed:
            reason = f"{folder.name} holds the run of seed {show(stored['seed'])}; rename it"
            raise SettingError("run_dir", directory, reason)
        if not (again and _is_done(folder, length)):
            yield job_config
        elif seed in begun:
            done = read_summary(folder).get("steps") or 0
            # Refuses other settings.
            merge_overrides(stored, resolved(job_config), typed)
            planned = stored.get("total_steps")  # a run may end a few steps later
            if isinstance(planned, int) and 0 < length < min(done, planned):
                raise too_short(length, done)


def _is_done(folder: Path, length: int) -> bool:
    """Return whether a run is finished: after `length` steps, or by a callback that ended it."""
    summary = read_summary(folder)
    if not is_finished(summary):
        return False
    planned = _stored(folder).get("total_steps") if summary.get("stopped_by") else None
    return max(summary.get("steps") or 0, planned if isinstance(planned, int) else 0) >= length


def _stored(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run: of its newest checkpoint, which nobody has edited."""
    for saved in saved_below(folder / CHECKPOINTS):
        with suppress(CheckpointError):
            return stored_config(saved.path, manifest_metadata(saved.path))
    file = folder / CONFIG
    try:
        stored = read_yaml(file)
        if not isinstance(stored, dict):
            raise ValueError("is no mapping of keys")
    except Exception as error:  # disk or parser: the file may contain anything
        raise CheckpointError(f"{file}: cannot be read: {describe(error)}") from error
    return stored


def seed_folder(directory: Path, seed: int) -> Path:
    """Return the run directory of a seed."""
    return directory / f"seed-{seed}"


def _validate_seeds(seeds: Sequence[int], typed: Sequence[str]) -> None:
    if "seed" in map(key_of, typed):
        raise SettingError("seeds", seeds, "cannot be combined with seed=…: leave one out")
    if rank_info().size > 1:
        reason = "cannot be combined with torchrun, whose ranks are one run"
        raise SettingError("seeds", seeds, reason)


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
    say("agent.compile=true: one graph serves the updates of all seeds")
    return [job if job.continues is not None else _compiling(job) for job in jobs]


def _compiling(job: Job) -> Job:
    agent = replace(job.settings.agent, compile="true")  # type: ignore[type-var]
    config = {**job.config, "agent": {**job.config["agent"], "compile": "true"}}
    return job._replace(settings=replace(job.settings, agent=agent), config=config)
