"""Checkpoints of several ranks: each writes its own files, rank 0 writes the manifest.

A checkpoint is complete once all files and the manifest are on disk, so all ranks must see the run
directory. Saver threads report in rank 0's store: they must not take part in training's
collectives.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from steadyrl.core.errors import ExpectedError, describe
from steadyrl.core.files import Files
from steadyrl.training.checkpoints.archive import TEMPORARY, read_part, write_archive, write_parts
from steadyrl.training.checkpoints.manifest import Checkpoint, CheckpointError, check, manifest_of
from steadyrl.training.checkpoints.reshard import prefix_of, saved_ranks
from steadyrl.training.checkpoints.run_directory import CHECKPOINTS
from steadyrl.training.checkpoints.saver import Saver
from steadyrl.training.checkpoints.store import Checkpoints
from steadyrl.training.config.settings import CheckpointSettings
from steadyrl.training.distributed.comm import POLL, Ranks

log = logging.getLogger("steadyrl")


class RankCheckpoints(Checkpoints):
    """Checkpoints that all ranks write to."""

    def __init__(self, directory: Path, ranks: Ranks, *, keep: int | None, files: Files) -> None:
        super().__init__(directory, keep=keep, files=files)
        self._ranks, self._count = ranks, 0
        self._path, self._open_error = directory, ""

    @override
    def sync(self) -> None:
        """Collective: wait for pending writes, and take rank 0's newest checkpoint and error."""
        with self._ranks.long_operation():
            self.wait()
        known = [str(self.last) if self.last else "", self.failure]
        last, self.failure = self._ranks.all_gather(known)[0]
        self.last = Path(last) if last else None

    @override
    def save(
        self,
        step: int,
        parts: Iterable[tuple[str, Any]],
        metadata: Mapping[str, Any],
        after: Callable[[], object] = lambda: None,
        *,
        prunes: bool = True,
    ) -> None:
        """Collective, after `sync`: create the directory on rank 0 and write in a thread."""
        self._count += 1
        name, refused = str(self._path), ""
        if self._ranks.rank == 0:
            try:
                name = str(super()._free_name(step))
                self.open()
                self._files.make_directory(_temporary(Path(name)))
            except OSError as error:
                refused = error.strerror or describe(error)
        agreed, self._open_error = self._ranks.all_gather([name, refused])[0]
        self._path = Path(agreed)
        super().save(step, parts, {**metadata, "ranks": self._ranks.size}, after, prunes=prunes)

    @override
    def _free_name(self, step: int) -> Path:
        return self._path

    @override
    def _save(
        self, step: int, parts: Iterable[tuple[str, Any]], metadata: Mapping[str, Any]
    ) -> None:
        if self._ranks.rank == 0:
            super()._save(step, parts, metadata)
            return
        result: dict[str, Any] = {}
        try:
            if self._open_error:
                raise OSError(self._open_error)
            linked, written = write_parts(self._files, _temporary(self._path), parts)
            for name, entry in written.items():
                check(_temporary(self._path) / name, entry)
            result["files"] = linked | written
        except Exception as error:  # any: rank 0 logs it and training continues
            result["error"] = f"rank {self._ranks.rank}: {describe(error)}"
        self._ranks.store.set(self._key(self._ranks.rank), json.dumps(result))

    @override
    def _write(
        self, path: Path, parts: Iterable[tuple[str, Any]], metadata: Mapping[str, Any]
    ) -> frozenset[str]:
        if self._open_error:
            raise OSError(self._open_error)
        return write_archive(self._files, path, parts, metadata, others=self._wait_for_others)

    def _wait_for_others(self) -> dict[str, Any]:
        """Wait for the other ranks' file entries; raise OSError if one failed or was lost."""
        entries: dict[str, Any] = {}
        errors = []
        for rank in range(1, self._ranks.size):
            key = self._key(rank)
            while not self._ranks.store.check([key]):
                if self._abandoned or self._ranks.heartbeat.lost is not None:
                    raise OSError("another rank was lost")
                time.sleep(POLL)
            result = json.loads(self._ranks.store.get(key))
            self._ranks.store.delete_key(key)
            entries |= result.get("files", {})
            errors += [result["error"]] if "error" in result else []
        if errors:
            raise OSError("; ".join(errors))
        return entries

    def _key(self, rank: int) -> str:
        return f"saved/{self._count}/{rank}"

    @override
    def iter_valid(self, refuse: Callable[[Mapping[str, Any]], None]) -> Iterator[Checkpoint]:
        """Collective: yield checkpoints valid on all ranks, newest first."""
        self.skipped = {}
        names = self._ranks.all_gather([saved.path.name for saved in self.candidates])[0]
        known = {saved.path.name: saved for saved in self.candidates}
        for name in names:
            reason = self._refusal(known.get(name), name, refuse)
            refusals = [each for each in self._ranks.all_gather(reason) if each]
            if refusals:
                self.skipped[self.directory / name] = refusals[0]
                continue
            yield known[name]
        reasons = "; ".join(self.skipped.values())
        raise CheckpointError(reasons or f"{self.directory}: no checkpoint to resume from")

    def _refusal(
        self, saved: Checkpoint | None, name: str, refuse: Callable[[Mapping[str, Any]], None]
    ) -> str | None:
        if saved is None:
            rank = self._ranks.rank
            return f"rank {rank} does not see {self.directory / name}: it must be on a shared disk"
        try:
            manifest = manifest_of(saved.path)
            refuse(manifest["metadata"])
            count = manifest["metadata"].get("ranks", 1)
            mine = {prefix_of(r) for r in range(self._ranks.rank, count, self._ranks.size)}
            for file, entry in manifest["files"].items():
                whose = file[:9] if file.startswith("rank") else ""
                if whose in mine:
                    check(saved.path / file, entry)
        except CheckpointError as error:
            return str(error)
        return None


class RankSaver(Saver):
    """Saves when any rank asks for it, and loads checkpoints of the same number of ranks."""

    def __init__(
        self,
        settings: CheckpointSettings,
        directory: Path,
        metadata: Mapping[str, Any],
        *,
        ranks: Ranks,
    ) -> None:
        super().__init__(settings, directory, metadata)
        self._ranks = self._comm = ranks
        self._prefix = prefix_of(ranks.rank)
        self.checkpoints: RankCheckpoints = RankCheckpoints(
            directory / CHECKPOINTS, ranks, keep=settings.most, files=self._files
        )
        self.wants_save = False  # this rank wants to save; not yet all-reduced
        self.save_now = False  # a rank asked for it: all save after this step
        self.still_writing = False  # a rank is still writing the last checkpoint

    @override
    def after_step(self, step: int, score: float | None, *, best: bool, requested: bool) -> None:
        """Save if all ranks do: timers and signals are all-reduced with the next step count."""
        self._wait_for_overwrite()
        due = self._schedule.pop_due(step)
        saves = self.save_now or (best and self._enabled) or (due and not self.still_writing)
        if saves:
            self.save(step, score)
        elif due:
            self._warn_disk_is_slow()
        overdue = self._schedule.overdue and not self.checkpoints.busy
        # A signal that came a moment after the other ranks' is answered by the save just made.
        self.wants_save = not saves and (self.wants_save or requested or overdue)
        self.save_now = False

    @override
    def save(self, step: int, score: float | None) -> None:
        """Collective: copy the run's state and write it in a thread."""
        self.wants_save = False
        with self._ranks.long_operation():  # as long as the disk takes
            super().save(step, score)

    @override
    def _wait_for_overwrite(self) -> None:
        with self._ranks.long_operation():
            super()._wait_for_overwrite()

    @override
    def _rank_parts(self) -> dict[str, Any]:
        return {"ranks": self._ranks.state_dict()}

    @override
    def _load(self, saved: Checkpoint) -> None:
        """Collective: load a checkpoint; raise CheckpointError if any rank cannot."""
        reason = None
        try:
            super()._load(saved)
            if saved_ranks(saved.path) == self._ranks.size:
                self._ranks.load_state_dict(read_part(saved.path, f"{self._prefix}ranks"))
        except Exception as error:  # corrupted data may raise anything
            if isinstance(error, ExpectedError) and not isinstance(error, CheckpointError):
                raise
            log.debug("cannot load %s", saved.path, exc_info=True)
            reason = describe(error)
        reasons = self._ranks.all_gather(reason)
        for rank, each in enumerate(reasons):
            if each:
                raise CheckpointError(f"rank {rank}: {each}")

    @override
    def remove_partial_writes(self) -> None:
        if self._ranks.rank == 0:
            super().remove_partial_writes()

    @override
    def last_valid(self) -> Path | None:
        return super().last_valid() if self._ranks.heartbeat.lost is None else self.checkpoints.last

    @override
    def write_policy(self, name: str, step: int, score: float | None) -> None:
        if self._ranks.rank == 0:
            super().write_policy(name, step, score)


def _temporary(path: Path) -> Path:
    return path.with_name(TEMPORARY + path.name)
