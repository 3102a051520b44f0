"""Resume from a URL: read its manifests, then fetch a checkpoint into a run directory.

What is fetched is checked like any stranger's file: names, sizes, links and hashes before it has
its name in the run directory.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from steadyrl.core.clock import doing
from steadyrl.core.errors import ExpectedError, SettingError, describe
from steadyrl.core.files import Files
from steadyrl.memory.process import readable
from steadyrl.training.checkpoints.manifest import (
    LARGEST_MANIFEST,
    MANIFEST,
    CheckpointError,
    manifest_of,
    saved_below,
)
from steadyrl.training.checkpoints.run_directory import BEST, LAST, resume_override
from steadyrl.training.logging.sinks import METRICS
from steadyrl.training.logging.tracker import LONGEST_TOKEN, TOKEN
from steadyrl.training.mirror.remote import CHECKPOINTS, SHA256, RemoteFolder, checkpoints_at

log = logging.getLogger("steadyrl")

FETCHING = ".fetching"  # below the run directory, until everything is there
MOST_CHECKPOINTS = 100  # that are looked at
LONGEST_METRICS = 1 << 30  # bytes


class ShortOfDiskError(CheckpointError):
    """A checkpoint does not fit on the disk; an older one would lose steps for nothing."""


@contextmanager
def fetched_manifests(url: str) -> Iterator[Path]:
    """Yield a temporary folder with the manifests of the checkpoints at `url`."""
    with TemporaryDirectory(prefix="steadyrl-") as name, doing(f"looking at {url}"):
        place = Path(name)
        with _errors_of(url, place):
            folder = RemoteFolder(url, "resume")
            for saved in checkpoints_at(folder)[:MOST_CHECKPOINTS]:
                with suppress(FileNotFoundError):  # of a copy that was interrupted
                    _fetch_manifest(folder, str(saved.path), place / saved.path)
        with _named(url, place):
            yield place


def holds_checkpoint(url: str) -> bool:
    """Return whether there is a checkpoint at `url`; CheckpointError if the store does not say."""
    with fetched_manifests(url) as place:
        return (place / CHECKPOINTS).is_dir()


def fetch(url: str, run: Path) -> None:
    """Fetch the newest usable checkpoint, policies and metrics into an empty run directory."""
    files, place = Files(), run / FETCHING
    if saved_below(run / CHECKPOINTS):
        again = f"choose another directory, or continue: {resume_override(run)}"
        reason = f"holds checkpoints already; {again}"
        raise SettingError("run_dir", run, reason)
    with doing(f"fetching the checkpoint from {url}"), _errors_of(url, place):
        folder = RemoteFolder(url, "resume")
        files.remove(place)
        try:
            files.make_directory(place)
            _fetch_newest(folder, place)
            for name in (LAST, BEST):
                with suppress(FileNotFoundError):
                    _fetch_policy(folder, name, place)
            for name, most in ((METRICS, LONGEST_METRICS), (TOKEN, LONGEST_TOKEN)):
                with suppress(FileNotFoundError):
                    files.write(place / name, folder.read(name, most))
            # The checkpoint last: a directory with one holds a run.
            for name in (METRICS, TOKEN, LAST, BEST, CHECKPOINTS):
                if (place / name).exists():
                    files.remove(run / name)
                    files.rename(place / name, run / name)
            files.sync_directory(run)
        finally:
            files.remove(place)


def _fetch_newest(folder: RemoteFolder, place: Path) -> None:
    reasons = []
    for saved in checkpoints_at(folder)[:MOST_CHECKPOINTS]:
        try:
            _fetch_archive(folder, str(saved.path), place / saved.path)
        except ShortOfDiskError:
            raise
        except (FileNotFoundError, CheckpointError) as error:
            if isinstance(error, FileNotFoundError) and len(folder.names(str(saved.path))) > 1:
                what = "is a run's own directory, not a copy by checkpoint.mirror"
                raise CheckpointError(f"{folder.url}: {what}: resume=DIRECTORY") from None
            reason = str(error) if isinstance(error, CheckpointError) else f"lacks {error}"
            reasons.append(f"{folder.url}/{saved.path}: {reason}")
            Files().remove(place / saved.path)
            continue
        for reason in reasons:
            log.warning("%s; using the checkpoint before it", reason)
        return
    raise CheckpointError("; ".join(reasons) or f"{folder.url}: has no checkpoint to continue from")


def _fetch_policy(folder: RemoteFolder, name: str, place: Path) -> None:
    try:
        _fetch_archive(folder, name, place / name)
    except CheckpointError as error:  # the run goes on without it
        log.warning("%s", error)
        Files().remove(place / name)


def _fetch_archive(folder: RemoteFolder, name: str, target: Path) -> None:
    """Fetch a manifest, then the files that it names, once their names and sizes are checked."""
    _fetch_manifest(folder, name, target)
    manifest = manifest_of(target)
    if not all(SHA256.fullmatch(entry["sha256"]) for entry in manifest["files"].values()):
        raise CheckpointError(f"{folder.url}/{name}/{MANIFEST}: has hashes that are none")
    need, free = sum(e["bytes"] for e in manifest["files"].values()), shutil.disk_usage(target).free
    if need > free:
        what = f"holds {readable(need)}, and {readable(free)} are free on the disk"
        sizes = folder.sizes()
        exists = all(sizes.get(e["sha256"]) == e["bytes"] for e in manifest["files"].values())
        kind = ShortOfDiskError if exists else CheckpointError  # sizes that nothing has are damage
        raise kind(f"{folder.url}/{name}: {what}")
    for file, entry in manifest["files"].items():
        folder.fetch(entry["sha256"], entry, target / file)
    Files().sync_directory(target)


def _fetch_manifest(folder: RemoteFolder, name: str, target: Path) -> None:
    text = folder.read(f"{name}/{MANIFEST}", LARGEST_MANIFEST)
    os.makedirs(target)
    Files().write(target / MANIFEST, text)


@contextmanager
def _errors_of(url: str, place: Path) -> Iterator[None]:
    """Name the URL in errors, not the copy at `place`; whatever a store raises is a refusal."""
    try:
        with _named(url, place):
            yield
    except (ExpectedError, MemoryError):
        raise
    except Exception as error:  # stores raise whatever they like
        raise CheckpointError(f"{url}: cannot be read: {describe(error)}") from error


@contextmanager
def _named(url: str, place: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        error.args = (str(error.args[0]).replace(str(place), url), *error.args[1:])
        raise
