"""The checkpoint directory of a run: write in a thread, verify, prune, list newest first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from steadyrl.core.errors import describe
from steadyrl.core.files import Files
from steadyrl.training.checkpoints.archive import remove_unfinished, write_archive
from steadyrl.training.checkpoints.manifest import (
    Checkpoint,
    CheckpointError,
    manifest_metadata,
    saved_below,
    verified_metadata,
)
from steadyrl.training.checkpoints.run_directory import unused

log = logging.getLogger("steadyrl")


def retained(
    whole: Sequence[Checkpoint], scores: Mapping[Path, float], keep: int | None
) -> set[Path]:
    """Return which checkpoints (newest first) stay: of the last `keep` steps, and the best one.

    Of a step that was saved again, the newest stays. `keep` None: all of them.
    """
    if keep is None:
        return {each.path for each in whole}
    newest = {each.step: each.path for each in reversed(whole)}
    last = sorted(newest, reverse=True)[:keep]
    best = max(scores, key=lambda path: scores[path], default=None)
    return {newest[step] for step in last} | ({best} if best is not None else set())


class Checkpoints:
    """Checkpoints in one directory; keeps the last `keep` and the best evaluated one.

    `keep` None: all of them.
    """

    def __init__(self, directory: Path, *, keep: int | None, files: Files | None = None) -> None:
        self.directory = directory
        self._keep = keep
        self._files = files or Files()
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._prunes = True
        self.failure: str | None = None  # reason why the last save failed
        self._has_warned = False  # that old checkpoints cannot be removed
        self.last: Path | None = None  # newest verified checkpoint
        self.chosen: Checkpoint | None = None  # the only one to resume from
        # Unusable checkpoints and the reason; they do not count towards `keep`.
        self.skipped: dict[Path, str] = {}
        self.save_seconds = 0.0  # duration of the last save
        # Called with each verified checkpoint.
        self.on_saved: Callable[[Path], object] = lambda path: None
        self.in_transfer: Callable[[], Collection[Path]] = tuple  # not to be removed yet

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def open(self) -> None:
        """Create the directory; remove partial writes of a killed process."""
        if not self.directory.exists():
            self._files.make_directory(self.directory)
            self._files.sync_directory(self.directory.parent)
        remove_unfinished(self._files, self.directory)

    def save(
        self,
        step: int,
        parts: Iterable[tuple[str, Any]],
        metadata: Mapping[str, Any],
        after: Callable[[], object] = lambda: None,
        *,
        prunes: bool = True,
    ) -> None:
        """Write a checkpoint in a thread, after any save in progress; warn once on failure.

        `after` is always called in the thread at the end. `prunes`: remove old checkpoints.
        """
        self.wait()
        self._prunes = prunes

        def write() -> None:
            try:
                self._save(step, parts, {"step": step, **metadata})
            finally:
                after()

        thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads may be started now
            write()
        else:
            self._thread = thread

    def sync(self) -> None:
        """Wait for a save in progress, on all ranks: `last` and `failure` are the same on each."""
        self.wait()

    def wait(self) -> None:
        """Wait for a save in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Do not warn if the save in progress fails: its memory is about to be released."""
        self._abandoned = True

    def _save(
        self, step: int, parts: Iterable[tuple[str, Any]], metadata: Mapping[str, Any]
    ) -> None:
        begin = time.perf_counter()
        try:
            path = self._free_name(step)
            new = self._write(path, parts, metadata)
            verified_metadata(path, only=new)  # linked files were verified when they were written
            self.skipped.pop(path, None)  # a new directory of this name
            self.last, self.failure = path, None
            self.on_saved(path)
        except Exception as error:  # training continues whatever it is
            if self.failure is None and not self._abandoned:
                none = self.last is None
                log.warning(
                    "cannot write the checkpoint of step %s (%s). Training continues; %s",
                    f"{step:,}",
                    describe(error),
                    "there is none to resume from yet" if none else "the previous one is kept",
                )
            self.failure = getattr(error, "strerror", None) or describe(error)
        else:
            if self._prunes and self._keep is not None:
                with suppress(OSError):  # a network file system may fail to list
                    self._prune()
        self.save_seconds = time.perf_counter() - begin

    def _write(
        self, path: Path, parts: Iterable[tuple[str, Any]], metadata: Mapping[str, Any]
    ) -> frozenset[str]:
        """Write a checkpoint; return the files that are not hard links."""
        self.open()
        return write_archive(self._files, path, parts, metadata)

    def _free_name(self, step: int) -> Path:
        """Return the name of a new checkpoint, which sorts after all others of this step."""
        attempts = [each.attempt for each in saved_below(self.directory) if each.step == step]
        return unused(self.directory, f"step-{step:012d}", 1 + max(attempts, default=0))

    @property
    def candidates(self) -> list[Checkpoint]:
        """Checkpoints to resume from, newest first, valid or not."""
        return saved_below(self.directory) if self.chosen is None else [self.chosen]

    def _prune(self) -> None:
        every = saved_below(self.directory)  # at least the one just written
        whole = [each for each in every if each.path not in self.skipped]
        stays = retained(whole, _scores(whole), self._keep) | {*self.in_transfer()}
        newest = every.index(whole[0])
        for each in every[newest:]:  # later steps, set aside by an earlier resume, stay
            if each.path not in stays:
                self._remove(each.path)

    def _remove(self, path: Path) -> None:
        try:
            self._files.remove(path)
        except OSError as error:  # nothing is lost by it: it may be another user's
            if not self._has_warned:
                log.warning("cannot remove old checkpoints (%s). Training continues", error)
            self._has_warned = True

    def iter_valid(self, refuse: Callable[[Mapping[str, Any]], None]) -> Iterator[Checkpoint]:
        """Yield checkpoints that verify and that `refuse` accepts, newest first.

        `skipped` holds the reasons for the others; CheckpointError once none is left.
        """
        self.skipped = {}
        for each in self.candidates:
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


def _scores(saved: Sequence[Checkpoint]) -> dict[Path, float]:
    scores: dict[Path, float] = {}
    for each in saved:
        try:
            score = manifest_metadata(each.path).get("eval_return_mean")
        except CheckpointError:
            continue
        if isinstance(score, int | float):
            scores[each.path] = score
    return scores
