"""The replay in a checkpoint: blocks of timesteps, immutable once complete.

A checkpoint hard-links the blocks of the previous one and writes new ones in a thread, from the
replay's own memory. Training goes on meanwhile and blocks only if it is about to overwrite a
timestep that is not yet written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.buffers.replay.timeline import ENDED, SKIPPED, TERMINATED, VALID
from steadyrl.core.clock import doing
from steadyrl.core.saved_state import Saved
from steadyrl.training.checkpoints.archive import Existing, read_part
from steadyrl.training.checkpoints.manifest import CheckpointError, check, manifest_of
from steadyrl.training.checkpoints.plain import nbytes_of

log = logging.getLogger("steadyrl")

BLOCK_BYTES = 8_000_000
SPARE = 1_000_000  # additional bytes allowed when reading a part
HASHED = 1 / 16  # of the blocks that a save links
METADATA, TAIL = "replay", "replay-tail"


def timesteps_per_block(replay: ReplayBuffer) -> int:
    """Return the timesteps per block; depends on the replay only."""
    return max(1, BLOCK_BYTES // replay.timestep_nbytes)


def block_name(number: int) -> str:
    """Return the part name of a complete block."""
    return f"replay-{number:09d}"


def _is_whole(checkpoint: Path, name: str, files: Mapping[str, Any], *, hashed: bool) -> bool:
    """Return whether a block's files are those that were written: by their size, or their hash."""
    for suffix in (".json", ".safetensors"):
        file, entry = checkpoint / (name + suffix), files.get(name + suffix)
        try:
            if entry is None:
                return False
            if file.lstat().st_size != entry["bytes"] or hashed:
                check(file, entry)
        except FileNotFoundError:
            return False
        except (CheckpointError, OSError) as error:
            log.warning("%s; it is written again", error)
            return False
    return True


class ReplaySave:
    """One save of a replay: created between two timesteps, written by another thread."""

    def __init__(self, replay: ReplayBuffer, before: Path | None, prefix: str = "") -> None:
        """Record what to save; part names get the `prefix`."""
        self._replay, self._before, self._prefix = replay, before, prefix
        self._size = timesteps_per_block(replay)
        self._newest = replay.timestep
        self._metadata = {**replay.metadata(), "block_timesteps": self._size}
        self._oldest = max(0, self._newest - replay.ring_size + 1)
        self._written = threading.Condition()
        self._safe = self._oldest  # timesteps below this number may be overwritten
        self._over = False

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield parts, oldest timesteps first, because they are overwritten first."""
        try:
            # A block that the disk damages would be in every later checkpoint, and its timesteps
            # are still in memory: some blocks are read in each save, others each time.
            files, random = self._files_before(), np.random.default_rng(max(0, self._newest))
            first, last = self._oldest // self._size, self._newest // self._size
            for number in range(first, last):
                name = self._prefix + block_name(number)
                end = (number + 1) * self._size
                part: Any
                hashed = random.random() < HASHED
                if self._before and _is_whole(self._before, name, files, hashed=hashed):
                    part = Existing(self._before, name)
                else:
                    part = self._timesteps(max(self._oldest, number * self._size), end)
                self._allow_overwriting(end)  # what is written is a copy
                yield name, part
            tail = self._timesteps(max(self._oldest, last * self._size), self._newest + 1)
            self._allow_overwriting(self._newest + 1)
            yield self._prefix + TAIL, tail
            yield self._prefix + METADATA, self._metadata
        finally:
            self.close()

    def _files_before(self) -> Mapping[str, Any]:
        """Return the manifest's entries of the last checkpoint; none if it has no manifest."""
        try:
            return manifest_of(self._before)["files"] if self._before else {}
        except CheckpointError:
            return {}

    def close(self) -> None:
        """Release a waiting trainer, whatever became of the save."""
        self._allow_overwriting(self._newest + 1, over=True)

    def _timesteps(self, begin: int, end: int) -> dict[str, Any]:
        return {"begin": begin, **self._replay.read_timesteps(begin, end)}

    def _allow_overwriting(self, below: int, *, over: bool = False) -> None:
        with self._written:
            self._safe, self._over = below, self._over or over
            self._written.notify_all()

    def wait_for_overwrite(self) -> None:
        """Block until the next timestep overwrites none that is still to be written."""
        overwritten = self._replay.timestep + 1 - self._replay.ring_size
        if self._over or overwritten < self._safe:
            return
        with doing("waiting for the disk to write the replay"), self._written:
            self._written.wait_for(lambda: self._over or overwritten < self._safe)


def saved_timesteps(path: Path, prefix: str, part: int, parts: int) -> Iterator[SavedTimestep]:
    """Yield part number `part` of `parts` equal parts of a saved replay's timesteps."""
    files = manifest_of(path)["files"]
    metadata = read_part(path, prefix + METADATA, files=files)
    flags, newest = metadata["timeline"]["flags"].numpy(), metadata["timeline"]["timestep"]
    size, oldest = metadata["block_timesteps"], max(0, newest - len(flags) + 1)
    begin, end = (oldest + (newest + 1 - oldest) * each // parts for each in (part, part + 1))
    for number in range(begin // size, -(-end // size)):
        name = TAIL if number == newest // size else block_name(number)
        block = read_part(path, prefix + name, files=files)
        first = block.pop("begin")
        stored = [block.pop(key).numpy() for key in ("frames", "action", "reward")]
        if block:
            raise CheckpointError(
                f"{path}: its replay has {', '.join(sorted(block))}, which cannot be divided among "
                "another number of ranks"
            )
        for each in range(max(begin, first), min(end, first + len(stored[-1]))):
            frame, action, reward = (array[each - first] for array in stored)
            yield SavedTimestep(frame, action, reward, flags[each % len(flags)])


def load_replay(replay: ReplayBuffer, path: Path, prefix: str = "") -> None:
    """Load a replay from a checkpoint, one block at a time."""
    most, files = SPARE + 2 * nbytes_of(replay.metadata()), manifest_of(path)["files"]
    metadata = read_part(path, prefix + METADATA, most=most, files=files)
    size = Saved(metadata, "replay").whole("block_timesteps", 1)
    replay.load_metadata(metadata)
    if replay.timestep < 0:
        return
    oldest = max(0, replay.timestep - replay.ring_size + 1)
    names = [block_name(number) for number in range(oldest // size, replay.timestep // size)]
    following, most = oldest, SPARE + 2 * timesteps_per_block(replay) * replay.timestep_nbytes
    for name in [*names, TAIL]:
        block = read_part(path, prefix + name, most=most, files=files)
        begin = Saved(block, name).whole("begin")
        del block["begin"]
        end = begin + min(len(part) for part in block.values())
        if begin > following or end <= following:
            raise CheckpointError(
                f"{path}: {name} holds timesteps {begin} to {end}, not {following}"
            )
        skip = following - begin
        replay.write_timesteps(following, {key: part[skip:] for key, part in block.items()})
        following = end
    if following != replay.timestep + 1:
        raise CheckpointError(
            f"{path}: the replay's timesteps end at {following}, not {replay.timestep + 1}"
        )


class SavedTimestep(NamedTuple):
    """One stored timestep of N environments."""

    frame: NDArray  # [N, *frame_shape]
    action: NDArray  # [N]
    reward: NDArray  # [N]
    flags: NDArray[np.uint8]  # [N]


def append_timesteps(replay: ReplayBuffer, timesteps: Iterable[SavedTimestep]) -> None:
    """Append consecutive timesteps as if they were collected now, after a start of their own.

    They get the priorities of new ones. Of the last one only the observation is kept.
    """
    before: SavedTimestep | None = None
    for timestep in timesteps:
        if before is None:
            replay.start_mid_episode(timestep.frame)
        else:
            ended, terminated, valid, skipped = (
                before.flags & bit != 0 for bit in (ENDED, TERMINATED, VALID, SKIPPED)
            )
            truncated = ended & ~terminated
            replay.timeline.skip(1, skipped)
            obs = replay.repeat_frame(timestep.frame)
            replay.add(before.action, before.reward, terminated, truncated, valid, obs)
        before = timestep
