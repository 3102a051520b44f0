"""The run directory: created per run and locked while the run is alive; runs below a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import count, islice
from pathlib import Path
from typing import Any

from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import ExpectedError, SettingError
from steadyrl.core.files import Files, lock, write_atomic
from steadyrl.core.safe_parsing import read_json
from steadyrl.core.saved_state import real
from steadyrl.training.config.overrides import as_override

RUNS = Path("outputs")  # where runs are if `run_dir` is null
LOCK = ".lock"
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"  # marks a directory as a run's
SUMMARY = "summary.json"  # result of the run
NUMBERS = ("steps", "wall_seconds", "return_mean", "eval_return_mean")  # in a summary
REPORT = "report.html"
LAST, BEST = "policy", "policy-best"  # directories of finished policies
SET_ASIDE = "set-aside"  # what came after an earlier checkpoint that the run was continued from
# Names that runs, seeds and sweeps write to.
FILES = re.compile(
    r"config\.yaml|summary\.json|metrics\.jsonl|train(-rank\d+)?\.log|\.lock|sweep\.json"
    r"|multirun\.yaml|out\.log|member\.json|report\.html|events\.out\.tfevents.*"
    r"|cuda-memory(-rank\d+)?\.pickle"
)
DIRECTORIES = re.compile(
    r"\.hydra|checkpoints|(\.(new|old)-)?policy(-best)?|videos|eval|returns|wandb|profiler|\.jobs"
    r"|seed-\d+|set-aside"
)
# What a new run would overwrite, remove or take for its own.
REPLACED = re.compile(
    r"summary\.json|metrics\.jsonl|report\.html|events\.out\..*|checkpoints|policy(-best)?|eval|returns"
)
REPLACED_BY_SEEDS = re.compile(r"summary\.json|report\.html")
# Directories of `seeds=[…]` and of sweeps.
ONE_OF_SEVERAL = re.compile(r"seed-\d+|(.*__)?job-\d+")
MOST_FOLDERS = 5_000  # that are searched for runs
EVENTS = "events.out.tfevents.*"
LOGGED = ("metrics.jsonl", EVENTS, f"eval/{EVENTS}", f"returns/{EVENTS}")
HALF_WRITTEN = re.compile(
    rf"\.({re.escape(CONFIG)}|{re.escape(SUMMARY)}|{re.escape(REPORT)})-[0-9a-f]{{8}}"
)


class RunDirectoryInUseError(ExpectedError):
    """The run directory is locked by another process."""

    exit_code = 6


class RunDirectoryLostError(ExpectedError):
    """The run directory was deleted or moved during the run."""

    exit_code = 2


def absolute(path: Path, key: str = "run_dir") -> Path:
    """Return `path` as an absolute path; SettingError of `key` if it cannot hold a run.

    Made absolute early: environments may change the working directory.
    """
    try:
        path = Path(os.path.abspath(path.expanduser()))
        found = next(each for each in (path, *path.parents) if each.exists())
    except (OSError, RuntimeError) as error:  # RuntimeError: no such home
        raise _unusable(path, error, key) from None
    if path == path.parent:
        raise SettingError(key, path, "is the root directory; choose another")
    if not found.is_dir():
        raise SettingError(key, path, f"{found} is a file; choose another directory")
    if not os.access(found, os.W_OK | os.X_OK):
        raise SettingError(key, path, f"{found} cannot be written to; choose another")
    return path


def _unusable(path: Path, error: Exception, key: str = "run_dir") -> SettingError:
    reason = getattr(error, "strerror", None) or str(error)
    return SettingError(key, path, f"cannot be used: {reason}; choose another directory")


def read_summary(directory: Path) -> dict[str, Any]:
    """Return a run's summary.json; empty if missing, unreadable or not a summary."""
    try:
        found = read_json(directory / SUMMARY)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and _is_summary(found) else {}


def _is_summary(found: Mapping[str, Any]) -> bool:
    """Return whether values that programs calculate with have the types that a run writes."""
    try:
        for key in NUMBERS:
            if found.get(key) is not None:
                real(found[key])
    except ValueError:
        return False
    return isinstance(found.get("status", ""), str)


def resume_override(run: Path | str) -> str:
    """Return `resume=RUN` as it is typed in a shell."""
    return shlex.quote(as_override("resume", str(run)))


def resume_command(run: Path | str, *overrides: str) -> str:
    """Return the command that continues a run."""
    return " ".join([command_of(), resume_override(run), *map(shlex.quote, overrides)])


def similar(path: Path) -> str:
    """Return '; did you mean X?' for a directory beside a missing one, with a similar name."""
    with suppress(OSError):
        beside = [each.name for each in islice(path.parent.iterdir(), MOST_FOLDERS)]
        for name in get_close_matches(path.name, beside, n=1):
            return f"; did you mean {path.with_name(name)}?"
    return ""


def newest_runs(folder: Path, inside: str, most: int = 3) -> list[Path]:
    """Return the newest runs below a folder that have the directory `inside`, newest first."""
    found = [run for run in _runs_below(folder) if (run / inside).is_dir()]
    found.sort(key=_written_at, reverse=True)
    return found[:most]


def _written_at(run: Path) -> int:
    """Return the time of a run's configuration; the earliest if it was removed meanwhile."""
    with suppress(OSError):
        return (run / CONFIG).stat().st_mtime_ns
    return 0


def _runs_below(folder: Path) -> Iterator[Path]:
    """Yield the runs below a folder, the least deep first; large file systems only in part.

    Names are times as a rule, so the last one is looked at first.
    """
    folders = deque([folder] if folder.resolve() != Path("/") else [])
    for _ in range(MOST_FOLDERS):
        if not folders:
            return
        here = folders.popleft()
        with suppress(OSError), os.scandir(here) as entries:
            inside = sorted(entries, key=lambda entry: entry.name, reverse=True)
            if any(entry.name == CONFIG for entry in inside):
                yield here  # there are no runs inside of a run
                continue
            kept = (entry for entry in inside if not entry.name.startswith("."))
            folders += [Path(each) for each in kept if each.is_dir(follow_symlinks=False)]


def set_aside(run: Path, later: Sequence[Path], name: str) -> Path:
    """Move files of a run into set-aside/`name`, which can be continued like a run; return it.

    Metrics and summary are copied. Killed meanwhile, it leaves a run that the same command
    continues.
    """
    place = unused(run / SET_ASIDE, name)
    try:
        place.mkdir(parents=True)
        copy_history(run, place)
        with suppress(FileNotFoundError):  # of a killed run
            shutil.copyfile(run / SUMMARY, place / SUMMARY)
        for path in later:
            target = place / path.relative_to(run)
            target.parent.mkdir(exist_ok=True)
            os.rename(path, target)
    except OSError as error:
        raise _unusable(run, error, "resume") from None
    return place


def copy_history(run: Path, place: Path) -> None:
    """Copy a run's metrics and event files to another directory, to be written on there."""
    for pattern in LOGGED:
        for path in run.glob(pattern):
            target = place / path.relative_to(run)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target, follow_symlinks=False)


def sync_history(files: Files, run: Path) -> None:
    """Fsync a run's metrics and event files; after an error, the rest is left to the system."""
    with suppress(OSError):
        found = [path for pattern in LOGGED for path in run.glob(pattern)]
        for folder in {path.parent for path in found}:
            files.sync_directory(folder)
        for path in found:
            files.sync(path)


def unused(folder: Path, name: str, attempt: int = 1) -> Path:
    """Return the first of `folder/name`, `folder/name-2`, … that does not exist.

    The search begins at number `attempt`.
    """
    paths = (folder / (name if each == 1 else f"{name}-{each}") for each in count(attempt))
    return next(path for path in paths if not path.exists())


def validate_not_in_use(path: Path) -> None:
    """Raise RunDirectoryInUseError if another run has locked this directory."""
    if _is_open_here(path / LOCK):
        raise _in_use_error(path)
    with suppress(OSError):  # what cannot hold a run is refused where it would be made
        try:
            handle = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise
            _validate_free_to_read(path)
            return
        try:
            _lock(handle, path)
        finally:
            os.close(handle)


def _validate_free_to_read(path: Path) -> None:
    """Do the same where this user may only read: a shared lock shows an exclusive one."""
    handle = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _in_use_error(path) from None
    finally:
        os.close(handle)


def _is_open_here(path: Path) -> bool:
    """Return whether this process has a file open: closing it again would release its lock."""
    try:
        found, numbers = os.lstat(path), os.listdir("/dev/fd")
    except OSError:  # there is no such file
        return False
    for number in numbers:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(os.fstat(int(number)), found):
                return True
    return False


def validate_no_links(path: Path) -> None:
    """Raise SettingError if a file or folder that a run writes to is a link, pipe or device.

    The target of a link would be overwritten or pruned; a pipe may block for ever.
    """
    with suppress(OSError), os.scandir(path) as entries:  # one that is not there yet holds none
        for each in entries:
            file, directory = FILES.fullmatch(each.name), DIRECTORIES.fullmatch(each.name)
            plain = (file and each.is_file(follow_symlinks=False)) or (
                directory and each.is_dir(follow_symlinks=False)
            )
            if (file or directory) and not plain:
                kind = "a link" if each.is_symlink() else "no plain file or directory"
                reason = f"{each.name} in it is {kind}: remove it, or choose another directory"
                raise SettingError("run_dir", path, reason)
    for saved in linked_checkpoints(path):
        reason = f"{CHECKPOINTS}/{saved.name} in it is a link: put what it names in its place"
        raise SettingError("run_dir", path, reason)


def linked_checkpoints(path: Path) -> list[Path]:
    """Return the links among a run's checkpoints, which no run reads."""
    saved = (path / CHECKPOINTS).glob("step-*")
    return sorted(each for each in saved if each.is_symlink())


def _validate_no_other_run(path: Path) -> None:
    """Raise SettingError if a new run here would hide another run, or lie inside of one."""
    folders = (each.parent for each in path.glob(f"*/{CONFIG}"))
    runs = sorted(each.name for each in folders if (each / LOCK).exists())
    if runs:
        raise SettingError("run_dir", path, f"holds runs ({_some(runs)}); choose another directory")
    for parent in path.parents:
        if (parent / CONFIG).exists() and (parent / LOCK).exists():
            reason = f"lies inside of the run {parent}; choose another directory"
            raise SettingError("run_dir", path, reason)


def validate_nothing_lost(path: Path, replaced: re.Pattern[str] = REPLACED) -> None:
    """Raise SettingError if a new run here would overwrite or remove files that are there."""
    with suppress(OSError), os.scandir(path) as entries:
        found = sorted(each.name for each in entries if replaced.fullmatch(each.name))
        full = [name for name in found if (path / name).is_file() or any((path / name).iterdir())]
        if full:
            reason = f"holds {_some(full)}, which a run writes itself; choose another directory"
            raise SettingError("run_dir", path, reason)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + " …" * (len(names) > 3)


def in_use(path: Path) -> bool:
    """Return whether a running run has locked this directory."""
    try:
        validate_not_in_use(path)
    except RunDirectoryInUseError:
        return True
    return False


def _lock(handle: int, path: Path) -> None:
    if not lock(handle):
        raise _in_use_error(path)


def _in_use_error(path: Path) -> RunDirectoryInUseError:
    return RunDirectoryInUseError(
        f"run_dir={path}: another run is using this directory; choose another"
    )


class RunDirectory:
    """A locked run directory; released on close or when the process dies.

    Created with `files` ({name: text}), or left as it was on failure. `continued`: it may hold a
    run, whose files `renew` replaces once a checkpoint is loaded.
    """

    def __init__(
        self, path: Path, files: Mapping[str, str] | None = None, *, continued: bool = False
    ) -> None:
        self.path = path
        self._made: list[Path] = []  # created here, in order, for undo
        self._lock = -1
        try:
            self._make(path)
            validate_no_links(path)
            self._take_lock()
            if self.holds_run and not continued:
                raise SettingError(
                    "run_dir",
                    path,
                    "holds a run already; choose another directory, or continue it: "
                    f"{resume_override(path)}",
                )
            if not self.holds_run:
                _validate_no_other_run(path)
                if not (continued and (path / CHECKPOINTS).exists()):
                    validate_nothing_lost(path)
            for name, text in (files or {}).items():
                self._write(path / name, text)
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise _unusable(path, error) from None
            raise

    @property
    def holds_run(self) -> bool:
        """Whether this directory holds a run."""
        return (self.path / CONFIG).exists()

    def renew(self, files: Mapping[str, str]) -> None:
        """Rewrite files; remove partial writes of a killed run and the old summary."""
        try:
            for path in self.path.glob(".*-????????"):
                if HALF_WRITTEN.fullmatch(path.name):
                    path.unlink()
            for name, text in files.items():
                self._make((self.path / name).parent)
                write_atomic(self.path / name, text)
            # If the run is killed now, no summary may claim that it finished.
            (self.path / SUMMARY).unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(self.path, error) from None

    def validate_exists(self) -> None:
        """Raise RunDirectoryLostError if the directory was deleted, moved or replaced."""
        with suppress(OSError):  # an I/O error does not mean that it is gone
            if not self.holds_run:
                raise RunDirectoryLostError(
                    f"run_dir={self.path}: was deleted or moved while the run was using it, "
                    "so nothing of the run can be kept there: start it again, or continue it "
                    "where it is now with resume="
                )

    def discard(self) -> None:
        """Remove what was created here, and release the lock."""
        for each in reversed(self._made):
            with suppress(OSError):  # may be in use by another run now
                each.rmdir() if each.is_dir() else each.unlink()
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, path: Path) -> None:
        missing = [each for each in (path, *path.parents) if not each.exists()]
        for each in reversed(missing):
            with suppress(FileExistsError):  # created by another run meanwhile
                Files().make_directory(each)
                self._made.append(each)
                Files().sync_directory(each.parent)

    def _take_lock(self) -> None:
        validate_not_in_use(self.path)
        place = self.path / LOCK
        is_new = not place.exists()
        self._lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        _lock(self._lock, self.path)
        if is_new:
            self._made.append(place)

    def _write(self, path: Path, text: str) -> None:
        self._make(path.parent)
        with path.open("x", encoding="utf-8") as file:
            self._made.append(path)
            file.write(text)


class UnlockedDirectory(RunDirectory):
    """The run directory on ranks > 0: rank 0 holds the lock and writes."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, -1

    def renew(self, files: Mapping[str, str]) -> None:
        """No-op: done by rank 0."""

    def validate_exists(self) -> None:
        """No-op: done by rank 0."""
