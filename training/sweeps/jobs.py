"""Jobs of a sweep and their status files in the sweep directory.

Every job has its own file, because launchers run jobs in several processes or on several machines.
`sweep.json` combines them for scripts.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from steadyrl.core.command.packages import installed_version
from steadyrl.core.errors import ExpectedError, SettingError
from steadyrl.core.files import lock, open_regular, write_atomic
from steadyrl.core.safe_parsing import read_json, read_yaml
from steadyrl.training.checkpoints.run_directory import CONFIG, read_summary, validate_no_links
from steadyrl.training.config.overrides import ABOUT_THE_RUN, flatten, is_free, key_of, set_key
from steadyrl.training.config.settings import completed, load_settings
from steadyrl.training.sweeps.subprocess_run import is_finished

FORMAT = 1
SWEEP, JOBS = "sweep.json", ".jobs"
ENDED = ("finished", "diverged", "failed", "killed", "interrupted")


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
    seconds: float | None = None  # of the last attempt
    error: str | None = None
    pid: int | None = None  # of its process, on `host`
    host: str | None = None
    runner: int | None = None  # pid of the process that has locked it on `host`
    counted: dict[str, Any] = field(default_factory=dict)  # the settings hashed into `identity`

    @property
    def begun(self) -> bool:
        """Whether its directory, or one of its seed directories, has a run that can be resumed."""
        place = Path(self.run_dir)
        return (place / CONFIG).exists() or any(place.glob(f"seed-*/{CONFIG}"))


def counted(values: Mapping[str, Any], swept: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that define a run, by full key.

    Values are converted: 1e5 is 100000. Keys in `swept` always count; keys missing in `values` get
    their defaults.
    """
    found = completed(values)
    with suppress(SettingError):  # invalid: the job itself will report it
        settings = load_settings(found)
        found = {**asdict(settings.run), "agent": asdict(settings.agent)}  # type: ignore[call-overload]
    keys = {
        key: value
        for key, value in flatten(found)
        if key in swept or (key not in ABOUT_THE_RUN and (key == "total_steps" or not is_free(key)))
    }
    if found.get("init_from") is not None:
        keys["init_from"] = found["init_from"]
    return keys


def identity(values: Mapping[str, Any], swept: Collection[str] = ()) -> str:
    """Return the hash of a run's defining settings: equal for configurations of the same run."""
    return digest(counted(values, swept))


def digest(keys: Mapping[str, Any]) -> str:
    """Return the hash of `counted` settings."""
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
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise SweepError(
                f"{file}: was not written by a sweep of this version; choose another "
                "hydra.sweep.dir"
            )

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Lock the sweep directory while jobs are planned."""
        plan = self.path / JOBS / ".plan"
        try:
            plan.parent.mkdir(parents=True, exist_ok=True)
            file = open_regular(plan, os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            raise SweepError(f"{plan}: cannot be used: {error.strerror}") from None
        with os.fdopen(file, "w"):
            lock(file, wait=True)
            yield

    def _file(self, name: str) -> Path:
        # Hashed: a name may contain slashes.
        return self.path / JOBS / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"

    @contextmanager
    def locked(self, job: SweepJob) -> Iterator[bool]:
        """Lock a job while it runs here; yield False if another process has locked it."""
        place = self._file(job.name).with_suffix(".lock")
        try:
            file = open_regular(place, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise SweepError(f"{place}: cannot be used: {error.strerror}") from None
        try:
            yield lock(file)
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
            place, here = self.path / job.run_dir, self.path / job.name
            # A job saved with its absolute path may have been moved since.
            job.run_dir = str(here if not place.exists() and here.exists() else place)
            return job
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
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
        summary = read_summary(Path(job.run_dir))
        if job.status != "finished" and is_finished(summary):
            # The process ended after writing the summary and before the status file.
            score, seconds = summary.get("eval_return_mean"), summary.get("wall_seconds")
            return replace(
                job, status="finished", exit_code=0, score=score, seconds=seconds, error=None
            )
        # fcntl locks do not conflict within a process, and closing would release our lock.
        ours = job.runner == os.getpid() and job.host == socket.gethostname()
        if job.status == "running" and not ours:
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


def progress_line(jobs: Sequence[SweepJob], at_once: int = 1) -> str:
    """Return the progress of a sweep as one line; `at_once` jobs run in parallel.

    It shows done, running and failed jobs, the best score and the time left.
    """
    count = {status: sum(job.status == status for job in jobs) for status in (*ENDED, "running")}
    failed = sum(count[status] for status in ENDED[1:4])
    parts = [f"{count['finished']}/{len(jobs)} done", f"{count['running']} running"]
    parts += [f"{failed} failed"]
    parts += [f"{count['interrupted']} interrupted"] if count["interrupted"] else []
    scored = [
        (job.score, job.label) for job in jobs if job.status == "finished" and job.score is not None
    ]
    if scored:
        score, label = max(scored, key=lambda each: each[0])
        parts.append(f"best {score:.1f} ({label})")
    took = [job.seconds for job in jobs if job.status == "finished" and job.seconds]
    left = sum(job.status in ("waiting", "running") for job in jobs)
    if took and left:
        seconds = round(sum(took) / len(took) * left / max(at_once, 1))
        parts.append(f"about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left")
    return "sweep: " + ", ".join(parts)


def _short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def table(jobs: Sequence[SweepJob]) -> str:
    """Return the jobs as an aligned table: label, status, score, seconds, error."""
    rows = [("job", "status", "score", "seconds", "")]
    for job in jobs:
        score = "–" if job.score is None else f"{job.score:.1f}"
        seconds = "–" if job.seconds is None else f"{job.seconds:.1f}"
        rows.append((job.label, job.status, score, seconds, _short(job.error or "")))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    )
