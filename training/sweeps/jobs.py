"""Jobs of a sweep and their status files in the sweep directory.

Every job has its own file, because launchers run jobs in several processes or on several machines.
`sweep.json` combines them for scripts.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

from steadyrl.core.command.typed import installed_version
from steadyrl.core.errors import ExpectedError
from steadyrl.core.files import lock, open_regular, write_atomic
from steadyrl.core.safe_parsing import read_json
from steadyrl.training.checkpoints.run_directory import CONFIG, read_summary, validate_no_links
from steadyrl.training.sweeps.subprocess_run import is_finished

FORMAT = 1
SWEEP, JOBS = "sweep.json", ".jobs"


class SweepError(ExpectedError):
    """The sweep directory cannot be used."""

    exit_code = 2


@dataclass
class SweepJob:
    """One job: its overrides, identity and outcome."""

    name: str  # of its directory and status file
    label: str  # overrides as typed: seed=1 agent=dqn
    overrides: list[str]
    identity: str
    run_dir: str
    place: str = ""  # position in the sweep, such as 2/6
    status: str = "waiting"
    exit_code: int | None = None
    score: float | None = None
    seconds: float | None = None  # of all attempts
    error: str | None = None
    pid: int | None = None  # of its process, on `host`
    host: str | None = None
    runner: int | None = None  # pid of the process that has locked it on `host`
    stop: str | None = None  # the file by which the sweep that runs it stops its jobs
    counted: dict[str, Any] = field(default_factory=dict)  # the settings hashed into `identity`

    @property
    def begun(self) -> bool:
        """Whether its directory, or one of its seed directories, has a run that can be resumed."""
        place = Path(self.run_dir)
        return (place / CONFIG).exists() or any(place.glob(f"seed-*/{CONFIG}"))

    def validate_types(self) -> None:
        """Raise TypeError or ValueError for values, read from a file, that no job has."""
        texts = [self.name, self.label, self.identity, self.run_dir, self.place, self.status]
        texts += [text for text in (self.error, self.host, self.stop) if text is not None]
        for text in (*texts, *self.overrides):
            text.encode()  # lone surrogates cannot be printed
        for number in (self.exit_code, self.score, self.seconds, self.pid, self.runner):
            if number is not None and (isinstance(number, bool) or not isinstance(number, Real)):
                raise TypeError("not a number")
        if not isinstance(self.overrides, list) or not isinstance(self.counted, dict):
            raise TypeError("not a list of overrides, or no settings")
        if ".." in Path(self.run_dir).parts:
            raise ValueError("a directory outside of the sweep's")


class SweepDirectory:
    """Status files of the jobs in a sweep directory; several sweeps may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        validate_no_links(path)
        self._validate_format()

    def _validate_format(self) -> None:
        file = self.path / SWEEP
        try:
            found = read_json(file)
            known = found["format"] == FORMAT and isinstance(found["jobs"], list)
        except FileNotFoundError:
            return
        except (KeyError, TypeError):
            known = False
        except (OSError, ValueError):  # damaged: it is written again from the jobs' files
            known = (self.path / JOBS).is_dir()
        if not known:
            raise SweepError(
                f"{file}: was not written by a sweep of this version; choose another "
                "hydra.sweep.dir"
            )

    def planning(self) -> AbstractContextManager[bool]:
        """Lock the sweep directory while jobs are planned."""
        return self._holding(self.path / JOBS / ".plan", wait=True)

    def _file(self, name: str) -> Path:
        # Hashed: a name may contain slashes.
        return self.path / JOBS / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"

    def locked(self, job: SweepJob) -> AbstractContextManager[bool]:
        """Lock a job while it runs here; yield False if another process has locked it."""
        return self._holding(self._file(job.name).with_suffix(".lock"))

    @contextmanager
    def _holding(self, place: Path, *, wait: bool = False) -> Iterator[bool]:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            file = open_regular(place, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise SweepError(f"{place}: cannot be used: {error.strerror}") from None
        try:
            yield lock(file, wait=wait)
        finally:
            os.close(file)

    def write(self, job: SweepJob) -> None:
        """Write a job's status file."""
        values = asdict(job)
        if Path(job.run_dir).is_relative_to(self.path):  # so that the directory can be moved
            values["run_dir"] = str(Path(job.run_dir).relative_to(self.path))
        self.write_file(self._file(job.name), json.dumps(values, default=str) + "\n")

    def write_file(self, path: Path, text: str) -> None:
        """Write one of the sweep's files; SweepError if that fails, on a full disk for example."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
        except OSError as error:
            reason = f"{error.strerror}; the same command resumes once this is mended"
            raise SweepError(f"{path}: cannot be written: {reason}") from None

    def read(self, name: str) -> SweepJob | None:
        """Return the job of this name; None if there is none."""
        return self._read(self._file(name))

    def _read(self, file: Path) -> SweepJob | None:
        try:
            job = SweepJob(**read_json(file))
            job.validate_types()
            job.run_dir = str(self.path / job.run_dir)
            return job
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError):
            raise SweepError(f"{file}: corrupted; remove it to run its job again") from None

    def named(self, names: Sequence[str]) -> list[SweepJob]:
        """Return the jobs of these names with their current status."""
        found = (self.read(name) for name in names)
        return [self.with_current_status(job) for job in found if job is not None]

    def all(self) -> list[SweepJob]:
        """Return all jobs with their current status."""
        found = (self._read(file) for file in (self.path / JOBS).glob("*.json"))
        return sorted(
            (self.with_current_status(job) for job in found if job), key=lambda job: job.name
        )

    def with_current_status(self, job: SweepJob) -> SweepJob:
        """Return a job with its current status; its process may have died unnoticed."""
        if job.status != "running":
            return job
        summary = read_summary(Path(job.run_dir))
        if is_finished(summary):
            # The process ended after writing the summary and before the status file.
            score, seconds = summary.get("eval_return_mean"), summary.get("wall_seconds")
            return replace(
                job, status="finished", exit_code=0, score=score, seconds=seconds, error=None
            )
        # fcntl locks do not conflict within a process, and closing would release our lock.
        ours = job.runner == os.getpid() and job.host == socket.gethostname()
        if not ours:
            with self.locked(job) as free:
                if free:
                    return replace(
                        job, status="killed", exit_code=-9, error="its process was killed"
                    )
        return job

    def is_done(self, job: SweepJob) -> bool:
        """Return whether a job has finished and its run still exists."""
        return job.status == "finished" and is_finished(read_summary(Path(job.run_dir)))

    def collect(self, order: Sequence[str]) -> list[SweepJob]:
        """Write sweep.json; return all jobs, those in `order` first."""
        rank = {name: at for at, name in enumerate(order)}
        jobs = sorted(self.all(), key=lambda job: (rank.get(job.name, len(rank)), job.name))
        hidden = ("identity", "pid", "host", "runner", "place", "counted")
        shown = [{k: v for k, v in asdict(job).items() if k not in hidden} for job in jobs]
        whole = {"format": FORMAT, "version": installed_version("steadyrl"), "jobs": shown}
        self.write_file(self.path / SWEEP, json.dumps(whole, indent=2) + "\n")
        return jobs
