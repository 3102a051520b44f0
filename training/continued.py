"""Continue a run in its directory: load its state, set later steps aside, log what changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from steadyrl.core.clock import doing
from steadyrl.core.errors import SettingError
from steadyrl.core.safe_parsing import read_yaml
from steadyrl.memory.host.kills import kernel_kills
from steadyrl.memory.watch import MemoryWatch
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    recover_path,
    verified_metadata,
)
from steadyrl.training.checkpoints.resume import set_aside_later
from steadyrl.training.checkpoints.run_directory import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    copy_history,
    set_aside,
)
from steadyrl.training.config.overrides import has_changed
from steadyrl.training.config.settings import Job
from steadyrl.training.logging.sinks import METRICS, last_logged_step
from steadyrl.training.logging.terminal import score
from steadyrl.training.logging.tracker import TOKEN
from steadyrl.training.report.killed import memory_near_limit
from steadyrl.training.run.run import Run
from steadyrl.training.run.services import RunServices

log = logging.getLogger("steadyrl")

EPISODES = ("seed", "episodes", "num_envs", "max_episode_steps")  # keys of `eval` that choose them


def continue_run(job: Job, run: Run, services: RunServices, texts: Mapping[str, str]) -> None:
    """Load the run's state, or start over if nothing was saved; write nothing before that.

    `texts`: the files of a run directory, of the present configuration. Hydra's own stay those of
    the command that began the run.
    """
    directory, saver = services.directory, services.saver
    over = job.continues is None and directory.holds_run
    memory = memory_near_limit(directory.path)  # of the run before, whose metrics are cut below
    if job.continues is not None:
        with doing("loading the checkpoint"):
            run.summary.resumed_from_step = saver.resume(job.checkpoint)
    earlier = job.checkpoint
    if job.continues and saver.checkpoints.skipped:  # the steps lost will not come again as before
        earlier = saver.checkpoints.last
    if earlier is not None:
        _leave_later_steps(earlier, run, services)
    left = _leave_unsaved_steps(services, job.config) if over else ""
    run.continue_schedules()
    begun = {name for name in texts if (directory.path / name).exists()} - {CONFIG}
    kept = begun if job.continues is not None else ()
    directory.renew({name: text for name, text in texts.items() if name not in kept})
    saver.remove_partial_writes()
    _trust_written_best(run, services, job.config["eval"])
    if _has_other_length(job) and not services.comm.rank:
        _leave_tracker_run(directory.path, run.steps)
    services.logger.continue_after(run.logged_step)
    if over:
        log.warning("no checkpoint in %s yet: starting over%s", directory.path, left)
    for reason in saver.checkpoints.skipped.values():
        log.warning("%s; using the checkpoint before it", reason)
    if job.continues is not None:
        _log_resume(run, job)
    if memory is not None:
        _log_kill(memory, services.watch)


def _log_kill(memory: str, watch: MemoryWatch) -> None:
    kills, nearest = kernel_kills(), watch.nearest_limit()
    log.warning(
        "the run was killed before it could end: %s%s%s. Give it more memory, or lower "
        "agent.replay.capacity or env.num_envs",
        memory,
        f"; now the nearest is the {nearest.bound.name}" if nearest is not None else "",
        f"; the kernel has killed processes of this control group for memory ({kills})"
        if kills
        else "",
    )


def _leave_later_steps(checkpoint: Path, run: Run, services: RunServices) -> None:
    """Set aside what came after the checkpoint, or take its history into a directory of its own."""
    directory, origin = services.directory.path, checkpoint.parents[1]
    if services.comm.rank:
        return
    if origin == directory:
        place = set_aside_later(directory, checkpoint, TOKEN)
        if place is not None:
            log.info("what came after step %s is set aside in %s", f"{run.steps:,}", place)
        return
    try:
        copy_history(origin, directory)
    except OSError as error:  # a full disk
        reason = f"the metrics of {origin} cannot be copied: {error.strerror}"
        raise SettingError("run_dir", directory, reason) from error


def _leave_unsaved_steps(services: RunServices, config: Mapping[str, Any]) -> str:
    """Set aside what a run had logged that has no checkpoint; return where, as text.

    With the same settings a run that was killed before its first checkpoint repeats the same; its
    folder of checkpoints is there.
    """
    run = services.directory.path
    if services.comm.rank or ((run / CHECKPOINTS).exists() and _has_settings(run, config)):
        return ""
    later = [run / name for name in (BEST, "videos", TOKEN) if (run / name).exists()]
    logged = (run / METRICS).is_file() and (run / METRICS).stat().st_size
    if not (logged or later):
        return ""
    return f"; what was logged is set aside in {set_aside(run, later, 'without-checkpoint')}"


def _has_settings(run: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a run was begun with these settings, by whatever kind of `resume`."""
    try:
        before = read_yaml(run / CONFIG)
    except Exception:  # disk or parser: the file may contain anything
        return False
    return isinstance(before, dict) and before | {"resume": None} == {**config, "resume": None}


def _has_other_length(job: Job) -> bool:
    """Return whether a run is continued with another `total_steps`, which schedules follow."""
    return has_changed("total_steps", job.continues or ())


def _leave_tracker_run(run: Path, step: int) -> None:
    """Begin a new run in the tracker if this one has steps after `step`: it cannot drop them."""
    with suppress(OSError):  # none was logged, or the disk fails: it warns when it writes
        if last_logged_step(run / METRICS) > step:
            (run / TOKEN).unlink(missing_ok=True)


def _trust_written_best(run: Run, services: RunServices, evaluation: Mapping[str, Any]) -> None:
    """Let the next evaluations be held against the best policy that is there.

    It may be damaged or gone, of an earlier evaluation (the last one could not be written), or
    scored by other episodes. One with a higher score is of steps that were lost, and will be again.
    """
    best, path = run.summary.best_eval_return_mean, services.directory.path / BEST
    written = services.comm.all_gather(_score_of(path, evaluation))[0]
    if best is None or (written is not None and written >= best):
        return
    run.summary.best_eval_return_mean = written
    there = "is damaged or gone, or was scored by other episodes"
    if written is not None:
        there = f"has a return of {score(written)}"
    log.warning(
        "%s %s, and the best so far was %s: a better one replaces it", BEST, there, score(best)
    )


def _score_of(policy: Path, evaluation: Mapping[str, Any]) -> float | None:
    """Return the score of a policy that was evaluated by the same episodes; else None."""
    try:
        metadata = verified_metadata(recover_path(policy))
    except CheckpointError:
        return None
    before, found = metadata["config"]["eval"], metadata["eval_return_mean"]
    same = all(before.get(key) == evaluation[key] for key in EPISODES)
    return float(found) if same and found is not None else None


def _log_resume(run: Run, job: Job) -> None:
    total_steps = job.settings.run.total_steps
    log.info("resumed from step %s", f"{run.steps:,}")
    if run.steps >= total_steps:
        log.warning(
            "nothing is left to train: all %s steps are done; total_steps=%d trains on",
            f"{run.steps:,}",
            2 * run.steps,
        )
    for change in job.continues or ():
        log.info("  with %s", change)
    if _has_other_length(job) and run.steps < total_steps:
        log.info("  schedules follow the new total_steps")
