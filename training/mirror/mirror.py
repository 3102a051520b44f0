"""Copy a run to object storage in a thread, which training never waits for.

A pass copies metrics, then the newest finished checkpoint (data before its manifest), policies and
summary, and removes what the local pruning has removed. While a pass runs, only the newest
checkpoint waits for the next one.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from steadyrl.core.clock import doing
from steadyrl.core.errors import SettingError, describe
from steadyrl.core.files import read_regular
from steadyrl.training.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    manifest_of,
    recover_path,
    saved_below,
)
from steadyrl.training.checkpoints.run_directory import BEST, LAST, SUMMARY
from steadyrl.training.checkpoints.store import Checkpoints
from steadyrl.training.logging.sinks import METRICS
from steadyrl.training.logging.tracker import TOKEN
from steadyrl.training.mirror.contents import Contents, OccupiedError
from steadyrl.training.mirror.remote import CHECKPOINTS, FILES, RemoteFolder

log = logging.getLogger("steadyrl")

FIELD = "checkpoint.mirror"
ANSWER_SECONDS = 20.0  # that the start of a run waits for the store
END_SECONDS = 60.0  # that its end waits for the last copy
FAILED_RANK_SECONDS = 20.0  # the same where one of several ranks fails: it is ended after 30 s
SUMMARY_SECONDS = 10.0  # the same, for the summary that says so
SILENT_SECONDS = 120.0  # without a finished file: the store hangs
LONGEST_PAUSE = 300.0  # between two tries
OWNER = "owner"  # names the process that copies
LONGEST_OWNER = 100  # bytes
LONGEST_TEXT = 1 << 30  # bytes of metrics that are copied


class NoMirror:
    """Copies nothing."""

    complete: bool | None = None  # whether the last `finish` found everything copied

    def attach(self, checkpoints: Checkpoints) -> None:
        """No-op."""

    def finish(self, seconds: float = END_SECONDS) -> bool:
        """No-op: there is nothing to wait for."""
        return True


NO_MIRROR = NoMirror()


class Mirror(NoMirror):
    """Copies one run to one folder of a store."""

    def __init__(
        self,
        folder: RemoteFolder,
        run: Path,
        config: Mapping[str, Any],
        *,
        keep: int | None,
        new: bool,
        goes_back: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`new`: the run begins now, and the folder must hold none.

        `goes_back`: the user has chosen the checkpoint to go on from; later copies are removed.
        """
        self._folder, self._run, self._config = folder, run, config
        self._keep, self._new, self._clock = keep, new, clock
        self._goes_back = goes_back
        self.complete = False
        self._contents: Contents | None = None
        self._owner: bytes | None = None  # this process's name in the store, once it copies there
        self._sent: dict[str, bytes] = {}  # hashes of texts
        self._left_out: set[str] = set()  # texts that are too large
        self._changed = threading.Condition()  # guards what follows
        self._offered: Path | None = None  # newest checkpoint that waits
        self._copying: Path | None = None
        self._wanted = True  # a pass is: the first one only looks
        self._passes = 0  # that were begun
        self._ended = 0  # passes that ended, of whatever outcome
        self._good = 0  # number of the last pass that copied everything
        self._closed = False
        self._occupied: OccupiedError | None = None
        self._failures, self._next_warning = 0, 1
        self._pause: float | None = None  # seconds until the next try
        self._progress, self._silence = clock(), SILENT_SECONDS
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def begin(self) -> None:
        """Look at the store, for a bounded time; SettingError if it holds another run."""
        self._thread.start()
        with doing(f"looking at {self._folder.url}"), self._changed:
            answered = self._changed.wait_for(lambda: self._ended > 0, ANSWER_SECONDS)
        if self._occupied is not None:
            again = f"choose another URL, or continue it: resume={self._folder.url}"
            raise SettingError(FIELD, self._folder.url, f"{self._occupied}; {again}")
        if not answered:
            self._warn(f"no answer within {ANSWER_SECONDS:.0f} s")

    def attach(self, checkpoints: Checkpoints) -> None:
        """Copy the checkpoints that are saved from now on, and the one resumed from."""
        checkpoints.on_saved, checkpoints.in_transfer = self.offer, self._in_transfer
        if checkpoints.last is not None:
            self.offer(checkpoints.last)

    def offer(self, checkpoint: Path) -> None:
        """Have a finished checkpoint copied, in place of one that still waits."""
        with self._changed:
            self._offered, self._wanted = checkpoint, True
            silent = self._clock() - self._progress if self._passes > self._ended else 0.0
            self._changed.notify_all()
        if silent >= self._silence:
            self._silence = 2 * silent
            self._warn(f"no file was finished for {silent:.0f} s")

    def _in_transfer(self) -> list[Path]:
        """Checkpoints that must not be removed yet."""
        with self._changed:
            return [path for path in (self._offered, self._copying) if path is not None]

    def finish(self, seconds: float = END_SECONDS) -> bool:
        """Wait until everything is copied, at most so long; return whether it is."""
        with doing(f"copying to {self._folder.url}"), self._changed:
            self._wanted, self._pause = True, None
            following = self._passes + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._good >= following or self._occupied, seconds)
            self.complete = self._good >= following
        if not self.complete:
            log.warning(
                "the copy in %s is not complete after %.0f s at the end of the run; "
                "everything is in %s",
                self._folder.url, seconds, self._run,
            )  # fmt: skip
        return self.complete

    def close(self) -> None:
        """End the thread after the file that it copies, without waiting for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while self._wait_for_work():
            try:
                self._copy(self._copying)
            except OccupiedError as error:  # found after the start, which had no answer
                self._warn(f"{error}: nothing is copied there")
                self._end_pass(occupied=error)
                return
            except Exception as error:  # stores raise whatever they like; training goes on
                self._failures += 1
                if self._failures >= self._next_warning:
                    self._next_warning = 2 * self._failures
                    times = "" if self._failures == 1 else f", {self._failures} failures so far"
                    self._warn(describe(error) + times)
                log.debug("copying to %s failed", self._folder.url, exc_info=True)
                self._end_pass(failed=True)
            else:
                self._end_pass()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed, self._pause)
            if self._offered is not None:
                self._copying, self._offered = self._offered, None
            self._wanted, self._progress = False, self._clock()
            self._passes += 1
            return not self._closed

    def _end_pass(self, *, failed: bool = False, occupied: OccupiedError | None = None) -> None:
        with self._changed:
            self._ended, self._occupied = self._passes, occupied
            if failed:
                self._pause = min(2.0 * (self._pause or 0.5), LONGEST_PAUSE)
            elif occupied is None:
                self._good, self._copying, self._pause = self._passes, None, None
            self._changed.notify_all()

    def _copy(self, checkpoint: Path | None) -> None:
        if self._contents is None:
            self._contents = Contents(
                self._folder, self._config, new=self._new, goes_back=self._goes_back
            )
        if self._passes == 1:  # nothing is built yet
            for saved in saved_below(self._run / CHECKPOINTS)[:1]:
                self._contents.validate_newest(saved.path.name)
            return
        self._validate_owner()
        stored = self._folder.sizes()
        if checkpoint is not None:
            self._contents.validate_newest(checkpoint.name)
        self._copy_text(TOKEN)
        self._copy_text(METRICS)  # a checkpoint's manifest must not come before its metrics
        if checkpoint is not None:
            self._copy_archive(checkpoint, f"{CHECKPOINTS}/{checkpoint.name}", stored)
        for name in (LAST, BEST):
            path = recover_path(self._run / name)
            if (path / MANIFEST).is_file():
                with suppress(FileNotFoundError, CheckpointError):  # being replaced: the next pass
                    self._copy_archive(path, name, stored)
        if checkpoint is not None:  # last: files of an interrupted copy may be named by now
            for name in self._contents.prune(f"{CHECKPOINTS}/{checkpoint.name}", self._keep):
                log.info("removed from %s: %s, which the run left", self._folder.url, name)
        self._copy_text(SUMMARY)

    def _validate_owner(self) -> None:
        """Raise OccupiedError once a later process of this run copies there: it went on from here.

        This one was frozen, or cut off. Both would remove files that the other's checkpoints name.
        """
        if self._owner is None:
            self._owner = uuid.uuid4().hex.encode()
        else:
            with suppress(FileNotFoundError):
                if self._folder.read(OWNER, LONGEST_OWNER) != self._owner:
                    raise OccupiedError("another process goes on with this run")
                return
        self._write(OWNER, self._owner)

    def _copy_archive(self, path: Path, name: str, stored: dict[str, int]) -> None:
        """Copy the files that the store lacks, then the manifest."""
        assert self._contents is not None
        manifest = manifest_of(path)
        if self._contents.holds(name, manifest):
            return
        for file, entry in manifest["files"].items():
            if stored.get(entry["sha256"]) != entry["bytes"]:
                self._write(f"{FILES}/{entry['sha256']}", path / file)
                stored[entry["sha256"]] = entry["bytes"]
        self._write(f"{name}/{MANIFEST}", (path / MANIFEST).read_bytes())
        self._contents.add(name, manifest)

    def _copy_text(self, name: str) -> None:
        try:
            text = read_regular(self._run / name, LONGEST_TEXT)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            if name not in self._left_out:
                self._left_out.add(name)
                self._warn(f"{describe(error)}; the rest of the run is still copied")
            return
        digest = hashlib.sha256(text).digest()
        if self._sent.get(name) != digest:
            self._write(name, text)
            self._sent[name] = digest

    def _write(self, name: str, source: bytes | Path) -> None:
        with self._changed:
            if self._closed:
                raise InterruptedError("the run has ended")
        self._folder.write(name, source)
        self._progress = self._clock()

    def _warn(self, reason: str) -> None:
        log.warning("cannot copy to %s (%s). Training continues", self._folder.url, reason)
