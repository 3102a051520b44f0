"""The checkpoints of a run: written in a thread, verified, pruned; read newest first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from steadyrl.core.errors import describe
from steadyrl.core.files import Files
from steadyrl.memory.reclaim import share_one_heap
from steadyrl.training.checkpoints.archive import remove_unfinished, write_archive
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    Saved,
    manifest_metadata,
    saved_below,
    verified_metadata,
)

log = logging.getLogger("steadyrl")


class Checkpoints:
    """Checkpoints below one directory; the last `keep` of them stay, and the best evaluated one."""

    def __init__(self, directory: Path, *, keep: int, files: Files | None = None) -> None:
        self.directory = directory
        self._keep = keep
        self._files = files or Files()
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._prunes = True
        self.failure: str | None = None  # why the newest one could not be written
        self.last: Path | None = None  # the newest one that is known to be whole
        # Those that cannot be used, and why; they count for nothing.
        self.skipped: dict[Path, str] = {}
        self.save_seconds = 0.0  # what the last save took

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def open(self) -> None:
        """Make the directory, and remove what a killed writer left in it."""
        if not self.directory.exists():
            self._files.make_directory(self.directory)
            self._files.sync_directory(self.directory.parent)
        remove_unfinished(self._files, self.directory)

    def save(
        self,
        step: int,
        parts: Iterable[tuple[str, Any]],
        metadata: Mapping[str, Any],
        after: Callable[[], object] = bool,
        *,
        prunes: bool = True,
    ) -> None:
        """Write a checkpoint in a thread, after the one under way; a failure is one warning.

        `after` is called there when it is over, also if no part was ever asked for. Older ones
        are removed, if it `prunes`.
        """
        self.wait()
        self._prunes = prunes

        def write() -> None:
            try:
                self._save(step, parts, {"step": step, **metadata})
            finally:
                after()

        share_one_heap()
        thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        thread.start()  # which fails where there may be no more of them
        self._thread = thread

    def settle(self) -> None:
        """Wait until it is certain which checkpoint is the newest."""
        self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Let a save under way end as it will: its memory is about to go."""
        self._abandoned = True

    def _save(
        self, step: int, parts: Iterable[tuple[str, Any]], metadata: Mapping[str, Any]
    ) -> None:
        begin = time.perf_counter()
        path = self._free_name(step)
        try:
            new = self._write(path, parts, metadata)
            verified_metadata(path, only=new)  # what is linked was checked when it was new
            self.skipped.pop(path, None)  # what had this name is gone
            self.last, self.failure = path, None
            if self._prunes:
                self._prune()
        except Exception as error:  # whatever it is, training goes on
            if self.failure is None and not self._abandoned:
                none = self.last is None
                log.warning(
                    "checkpoint at step %s cannot be written (%s): training goes on, %s",
                    f"{step:,}",
                    describe(error),
                    "there is none to continue from yet" if none else "the one before is kept",
                )
            self.failure = getattr(error, "strerror", None) or describe(error)
        self.save_seconds = time.perf_counter() - begin

    def _write(
        self, path: Path, parts: Iterable[tuple[str, Any]], metadata: Mapping[str, Any]
    ) -> frozenset[str]:
        """Write a checkpoint; return its files that are new."""
        self.open()
        return write_archive(self._files, path, parts, metadata)

    def _free_name(self, step: int) -> Path:
        """Name a directory that does not exist; one that is damaged may have the plain name."""
        path = self.directory / f"step-{step:012d}"
        attempt = 2
        while path.exists():
            path = self.directory / f"step-{step:012d}-{attempt}"
            attempt += 1
        return path

    def all(self) -> list[Saved]:
        """Return what there is, newest first, whole or not."""
        return saved_below(self.directory)

    def _prune(self) -> None:
        every = self.all()  # with one, at least, that was just written
        whole = [each for each in every if each.path not in self.skipped]
        kept = {self._best(whole), *(each.path for each in whole[: self._keep])}
        for each in every[every.index(whole[0]) :]:  # what lies ahead may be of use to somebody
            if each.path not in kept:
                self._files.remove(each.path)

    def _best(self, saved: list[Saved]) -> Path | None:
        scores: dict[Path, float] = {}
        for each in saved:
            try:
                score = manifest_metadata(each.path).get("eval_return_mean")
            except CheckpointError:
                continue
            if isinstance(score, int | float):
                scores[each.path] = score
        return max(scores, key=lambda path: scores[path]) if scores else None

    def iter_valid(self, refuse: Callable[[Mapping[str, Any]], None]) -> Iterator[Saved]:
        """Yield the checkpoints that are whole and that `refuse` lets pass, newest first.

        `skipped` says why others were left out; that none is left is a CheckpointError.
        """
        self.skipped = {}
        for each in self.all():
            try:
                refuse(verified_metadata(each.path))
            except CheckpointError as error:
                self.skipped[each.path] = str(error)
                continue
            yield each
        reasons = "; ".join(self.skipped.values())
        raise CheckpointError(
            reasons or f"{self.directory}: there is no checkpoint to continue from"
        )
