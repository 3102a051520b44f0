"""Continue a run in its directory: load its state, set later steps aside, log what changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from steadyrl.core.clock import doing
from steadyrl.core.errors import SettingError
from steadyrl.memory.host.kills import kernel_kills
from steadyrl.memory.watch import MemoryWatch
from steadyrl.training.checkpoints.resume import CHECKPOINTS, set_aside_later
from steadyrl.training.checkpoints.run_directory import BEST, copy_history, set_aside
from steadyrl.training.config.settings import Job
from steadyrl.training.logging.sinks import METRICS
from steadyrl.training.report.killed import memory_near_limit
from steadyrl.training.run.run import Run
from steadyrl.training.run.services import RunServices

log = logging.getLogger("steadyrl")


def continue_run(job: Job, run: Run, services: RunServices, texts: Mapping[str, str]) -> None:
    """Load the run's state, or start over if nothing was saved; write nothing before that.

    `texts`: the files of a run directory, of the present configuration.
    """
    directory, saver = services.directory, services.saver
    over = job.continues is None and directory.holds_run
    memory = memory_near_limit(directory.path)  # of the run before, whose metrics are cut below
    if job.continues is not None:
        with doing("loading the checkpoint"):
            run.summary.resumed_from_step = saver.resume(job.checkpoint)
    if job.checkpoint is not None:
        _leave_later_steps(job.checkpoint, run, services)
    left = _leave_unsaved_steps(services) if over else ""
    run.continue_schedules()
    directory.renew(texts)
    saver.remove_partial_writes()
    _forget_lost_best(run, services)
    services.logger.continue_after(run.logged_step)
    if over:
        log.warning("no checkpoint in %s yet: starting over%s", directory.path, left)
    for reason in saver.checkpoints.skipped.values():
        log.warning("%s; using the checkpoint before it", reason)
    if job.continues is not None:
        _log_resume(run, job.continues, job.settings.run.total_steps)
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
        place = set_aside_later(directory, checkpoint)
        if place is not None:
            log.info("what came after step %s is set aside in %s", f"{run.steps:,}", place)
        return
    try:
        copy_history(origin, directory)
    except OSError as error:  # a full disk
        reason = f"the metrics of {origin} cannot be copied: {error.strerror}"
        raise SettingError("run_dir", directory, reason) from error


def _leave_unsaved_steps(services: RunServices) -> str:
    """Set aside what a run had logged whose checkpoints are lost; return where, as text.

    A run that was killed before its first checkpoint has the directory, and repeats the same.
    """
    run = services.directory.path
    if services.comm.rank or (run / CHECKPOINTS).exists():
        return ""
    later = [run / name for name in (BEST, "videos") if (run / name).exists()]
    logged = (run / METRICS).is_file() and (run / METRICS).stat().st_size
    if not (logged or later):
        return ""
    return f"; what was logged is set aside in {set_aside(run, later, 'without-checkpoint')}"


def _forget_lost_best(run: Run, services: RunServices) -> None:
    """Let the next evaluation be the best one if the best policy is of later steps, or is gone."""
    if not services.comm.all_gather((services.directory.path / BEST).exists())[0]:
        run.summary.best_eval_return_mean = None


def _log_resume(run: Run, changes: tuple[str, ...], total_steps: int) -> None:
    log.info("resumed from step %s", f"{run.steps:,}")
    if run.steps > total_steps:
        log.warning(
            "nothing is left to train: total_steps=%d is the whole length, and %s steps are done; "
            "total_steps=%d trains %s more",
            total_steps,
            f"{run.steps:,}",
            run.steps + total_steps,
            f"{total_steps:,}",
        )
    elif run.steps == total_steps:
        log.warning(
            "nothing is left to train: all %s steps are done; total_steps=%d trains on",
            f"{total_steps:,}",
            2 * run.steps,
        )
    for change in changes:
        log.info("  with %s", change)
    changed = any(change.startswith("total_steps=") for change in changes)
    if changed and run.steps < total_steps:
        log.info("  schedules follow the new total_steps")
