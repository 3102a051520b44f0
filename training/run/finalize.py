"""How a run ends: status, summary, last log lines, errors."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import ExpectedError, MemoryBudgetError, NonFiniteError, describe
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.training.callbacks.callback import CallbackError
from steadyrl.training.checkpoints.run_directory import SUMMARY, RunDirectoryLostError
from steadyrl.training.checkpoints.unsaved import CHECKPOINT, UnsavedError, explain
from steadyrl.training.logging.terminal import score
from steadyrl.training.mirror.mirror import END_SECONDS, FAILED_RANK_SECONDS, SUMMARY_SECONDS

if TYPE_CHECKING:
    from steadyrl.training.checkpoints.saver import Saver
    from steadyrl.training.checkpoints.summary import Summary
    from steadyrl.training.run.run import Run
    from steadyrl.training.run.services import RunServices


log = logging.getLogger("steadyrl")

# Errors that keep their exit code even if a signal was received before.
OWN_ENDS = (MemoryBudgetError, RunDirectoryLostError, GeneratorExit, SystemExit)
OF_USER_CODE = (EnvironmentFailedError, CallbackError)


@contextmanager
def finalize_run(run: Run, services: RunServices) -> Iterator[None]:
    """Settle the run however it ends; then call the callbacks, which may take long or fail."""
    failed = True
    try:
        with _settled(run, services):
            yield
        failed = False
    finally:
        try:
            run.callbacks.end(run.steps, failed=failed)
        except CallbackError as error:
            log.debug("the run failed", exc_info=True)
            run.summary.status = "failed"
            run.summary.save(services.directory.path)
            _copy_summary(run, services)
            services.report_writer.write_at_end()
            _add_log_file(error, services)
            raise


@contextmanager
def _settled(run: Run, services: RunServices) -> Iterator[None]:
    """Set the summary's status however the run ends; write the summary, then the report."""
    try:
        with services.comm.reporting_errors():
            yield
            run.complete()
    except KeyboardInterrupt:
        services.report_writer.cancel()
        run.fail("interrupted")
        _log_lost_steps(run.steps, services.saver)
        if services.saver.continues:
            log.info("resume: %s", services.saver.resume_command())
        raise
    except NonFiniteError as error:
        log.debug("the run diverged", exc_info=True)
        run.fail("diverged")
        last = services.saver.last_valid()
        if last is not None:
            error.append(f"; the last good checkpoint is {last}")
        raise
    except BaseException as error:
        log.debug("the run failed", exc_info=True)
        if services.signals.received is not None and not isinstance(error, OWN_ENDS):
            _end_by_signal(run, services, error)
        else:
            run.fail("failed")
            services.saver.last_valid()  # waits for the checkpoint being written
            if isinstance(error, OF_USER_CODE) and error.__cause__ is not None:
                _add_resume_command(error, run, services)
            raise
    finally:
        try:
            _finish_mirror(run, services)
        finally:
            services.progress.close()
            services.watch.finish(run.steps)
            with services.signals.shielded():
                lost = _write_summary(run, services) if services.comm.rank == 0 else {}
        _copy_summary(run, services)
        reported = services.report_writer.write_at_end()
    _log_end(run, services)
    if reported:
        log.info("report: %s", services.report_writer.path)
    if run.summary.status == "interrupted" and services.saver.continues:
        log.info("resume: %s", services.saver.resume_command())  # last: it is what to type next
    _raise_if_unsaved(run, services, lost)


def _add_log_file(error: ExpectedError, services: RunServices) -> None:
    """Add where the traceback of a user's code is."""
    error.append(f"; the traceback is in {services.log_file}")


def _add_resume_command(error: ExpectedError, run: Run, services: RunServices) -> None:
    """Add log and resume command to the error of a user's code; log what is lost."""
    _add_log_file(error, services)
    if services.comm.is_single:  # of several ranks only the first knows the newest checkpoint
        _log_lost_steps(run.steps, services.saver)
        error.with_details(*services.saver.go_on())


def _end_by_signal(run: Run, services: RunServices, error: BaseException) -> None:
    """End a run that failed after a signal: compilers and simulators get Ctrl-C too, and end.

    Of several ranks, raise the error: the others do not take part in the end's collectives.
    """
    run.fail("interrupted")
    services.saver.last_valid()  # waits for the checkpoint being written
    if (services.saver.last_step or 0) != run.steps:
        run.unsaved = True
        log.error("not saved: after the signal, %s", describe(error))
        _log_lost_steps(run.steps, services.saver)
    if not services.comm.is_single:
        raise error


def _log_lost_steps(steps: int, saver: Saver) -> None:
    """Log how many steps a run that ends without saving loses."""
    if saver.last_step is None:
        log.info("lost: all %s steps, no checkpoint was written", f"{steps:,}")
        return
    if steps > saver.last_step:
        lost = steps - saver.last_step
        many = f"{lost:,} step{'' if lost == 1 else 's'}"
        log.info("lost: %s since the checkpoint of step %s", many, f"{saver.last_step:,}")


def _finish_mirror(run: Run, services: RunServices) -> None:
    """Wait for the last copy, unless the run is to end at once; a second signal ends the wait.

    One of several ranks that fails has less time: its heartbeat and torchrun end it after 30 s.
    """
    error, seconds = sys.exception(), END_SECONDS
    if isinstance(error, KeyboardInterrupt):
        seconds = 0.0
    elif error is not None and not services.comm.is_single:
        seconds = FAILED_RANK_SECONDS
    services.signals.saving = True  # from here on the first signal has no time limit
    if services.mirror.complete is not None:  # whoever ends the process meanwhile leaves this one
        run.summary.mirror_complete = False
        run.summary.save(services.directory.path)
    try:
        services.mirror.finish(seconds)
    finally:
        run.summary.mirror_complete = services.mirror.complete


def _copy_summary(run: Run, services: RunServices) -> None:
    """Copy the summary to a complete mirror too; correct it if that fails."""
    if run.summary.mirror_complete and not services.mirror.finish(SUMMARY_SECONDS):
        run.summary.mirror_complete = False
        run.summary.save(services.directory.path)


def _write_summary(run: Run, services: RunServices) -> dict[str, str]:
    """Write the summary; return the files of the run's end that were not written, and why."""
    lost = services.saver.lost
    if services.logger.lost is not None:
        lost["the last metrics"] = services.logger.lost
    if lost and run.summary.status == "finished":
        run.summary.status = "failed"  # scripts that read it must not take the run for complete
    reason = run.summary.save(services.directory.path)
    return lost if reason is None else {**lost, SUMMARY: reason}


def _raise_if_unsaved(run: Run, services: RunServices, lost: dict[str, str]) -> None:
    """On all ranks: raise UnsavedError if the run's last files could not be written.

    An interrupted run only needs a checkpoint to resume from; without one it gets the exit code.
    """
    saver, path = services.saver, services.directory.path
    interrupted = run.summary.status == "interrupted"
    if interrupted and saver.continues and CHECKPOINT not in lost:
        lost = {}
    line = lost and explain(path, run.steps, lost, continues=saver.continues)
    # With checkpoint.every=0 and checkpoint.seconds=0 nothing was written, and nothing failed.
    behind = interrupted and (saver.last_step or 0) != run.steps
    line, behind = services.comm.all_gather([line or None, behind])[0]
    if line is None:
        if behind and not run.unsaved:
            run.unsaved = True
            _log_lost_steps(run.steps, saver)
        return
    if interrupted:
        run.unsaved = True
        log.error(line)
        return
    error = UnsavedError(line)
    error.silent = services.comm.rank > 0
    raise error


def time_by_part(summary: Summary) -> str:
    """Return where a run's time went, most first: "update 62%, environment 30%, …"."""
    parts = ("environment", "act", "update", "evaluation", "other")
    fractions = [(getattr(summary, f"time_share_{name}"), name) for name in parts]
    most_first = sorted(fractions, key=lambda each: each[0], reverse=True)
    return ", ".join(f"{name} {part:.0%}" for part, name in most_first if part >= 0.005)


def _log_end(run: Run, services: RunServices) -> None:
    s, path = run.summary, services.directory.path
    evaluated = (
        "" if s.eval_return_mean is None else f", evaluated return {score(s.eval_return_mean)}"
    )
    mean = "" if s.return_mean is None else f", return {score(s.return_mean)}"
    log.info(
        "%s after %s steps in %.0f s (%s steps/s)%s%s",
        s.status,
        f"{s.steps:,}",
        s.wall_seconds,
        f"{s.steps_per_second:,.0f}",
        mean,
        evaluated,
    )
    log.info("time: %s", time_by_part(s))
    log.info("run:    %s", path)
    program = "tensorboard --logdir" if services.logger.tensorboard else command_of("plot")
    log.info("curves: %s %s", program, shlex.quote(str(path)))
