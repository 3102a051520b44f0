"""A run's own report: written every `report.every` steps, and when the run ends."""

from __future__ import annotations

import logging
from pathlib import Path

from steadyrl.core.clock import Interval
from steadyrl.core.errors import describe
from steadyrl.core.files import write_atomic
from steadyrl.training.analysis.groups import AGENT, Group, groups
from steadyrl.training.analysis.past_runs import read_run
from steadyrl.training.checkpoints.run_directory import CONFIG, REPORT
from steadyrl.training.config.settings import ReportSettings
from steadyrl.training.report.page import LINES, page

log = logging.getLogger("steadyrl")


def write_group(directory: Path) -> Path | None:
    """Write one report of all runs below a directory into it; return it, None if that failed."""
    try:
        found, left_out = groups([str(directory)], None, (), LINES)
        write_atomic(directory / REPORT, page(found, left_out, directory))
    except Exception as error:  # disks, memory, whatever the files hold
        _warn(error)
        return None
    return directory / REPORT


def _warn(error: Exception) -> None:
    log.debug("no report", exc_info=True)
    reason = getattr(error, "strerror", None) or describe(error)
    log.warning("cannot write %s (%s)", REPORT, reason)


class ReportWriter:
    """Write `report.html` into the run directory.

    It takes some 30 ms (0.3 s for 100,000 log lines). Failures are logged once and never stop the
    run. Ranks other than the first only count.
    """

    def __init__(self, settings: ReportSettings, directory: Path, *, writes: bool) -> None:
        self.path = directory / REPORT
        self._directory, self._writes = directory, writes
        self._at_end = settings.at_end or settings.every > 0
        self._due = Interval(settings.every)
        self._warned = False

    @property
    def next(self) -> int | None:
        """The step of the next report; None without any before the end."""
        return self._due.next

    def continue_at(self, step: int) -> None:
        """Skip the reports of steps before `step`, at which the run is resumed."""
        self._due.pop_due(step)

    def maybe_write(self, step: int) -> None:
        """Write the report if it is due."""
        if self._due.pop_due(step):
            self._write(is_running=True)

    def cancel(self) -> None:
        """Write no report at the end: a second signal ends the process at once."""
        self._at_end = False

    def write_at_end(self) -> bool:
        """Write the report of a run that has ended, if asked for; return whether it is there."""
        return self._at_end and self._write()

    def _write(self, *, is_running: bool = False) -> bool:
        """Return whether the report was written."""
        if not self._writes or not (self._directory / CONFIG).exists():  # the directory is gone
            return False
        try:
            run = read_run(self._directory, None, LINES, is_running=is_running)
            group = Group(str(run.config.get(AGENT, "run")), run.env, [run])
            write_atomic(self.path, page([group], [], self._directory))
        except Exception as error:  # disks, memory, whatever the files hold
            if not self._warned:
                _warn(error)
            self._warned = True
            return False
        return True
