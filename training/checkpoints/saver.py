"""When a run is saved, of what its checkpoints consist, and how one of them is continued."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from steadyrl.agents.base import Agent
from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.core.clock import Interval
from steadyrl.core.errors import ExpectedError, NonFiniteError, describe
from steadyrl.core.files import Files
from steadyrl.core.saved import Saved as SavedState
from steadyrl.core.state import Stateful, give
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.checkpoints.archive import (
    Existing,
    finish_replacing,
    read_part,
    replace_archive,
)
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    Saved,
    differences,
    manifest_metadata,
)
from steadyrl.training.checkpoints.plain import finite, nbytes_of
from steadyrl.training.checkpoints.replay_blocks import METADATA, ReplaySave, load_replay
from steadyrl.training.checkpoints.reshard import parts_of, reshard, saved_ranks
from steadyrl.training.checkpoints.run_directory import BEST, LAST
from steadyrl.training.checkpoints.store import Checkpoints
from steadyrl.training.checkpoints.unsaved import CHECKPOINT
from steadyrl.training.config.settings import CheckpointSettings

log = logging.getLogger("steadyrl")

# A saved state may be larger than that of an agent that has not learned yet: optimisers' moments.
LARGER, SPARE = 8, 16_000_000  # times, and bytes besides


class SavedRun(Stateful):
    """The part of a run that is saved besides its environments and agent: its counters."""

    @abstractmethod
    def check_consistency(self, step: int, env: VectorEnv) -> None:
        """Refuse a state that contradicts the step of its checkpoint, or the environments'."""


class CheckpointSchedule:
    """When a run is saved: every so many steps, every so many seconds, or both."""

    def __init__(self, settings: CheckpointSettings, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = settings.seconds, clock
        self._steps = Interval(settings.every)
        self._next = float("inf")
        self.begin_anew()

    @property
    def next(self) -> int | None:
        """The next step of those asked for."""
        return self._steps.next

    def due(self, step: int) -> bool:
        """Return whether so many steps are made; true once."""
        return self._steps.due(step)

    @property
    def overdue(self) -> bool:
        """Whether so many seconds have passed."""
        return self._clock() >= self._next

    def begin_anew(self) -> None:
        """Count seconds from now on."""
        if self._seconds:
            self._next = self._clock() + self._seconds


class _Policy(NamedTuple):
    """A policy to be written, and why it could not be."""

    weights: dict[str, Tensor]
    metadata: dict[str, Any]
    reason: str = ""


class Saver:
    """Saves a run between two rows, in a thread; takes it back when it is continued."""

    def __init__(
        self,
        settings: CheckpointSettings,
        directory: Path,
        metadata: Mapping[str, Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        files: Files | None = None,
    ) -> None:
        self.checkpoints = Checkpoints(directory / "checkpoints", keep=settings.keep, files=files)
        self._settings, self._directory, self._metadata = settings, directory, dict(metadata)
        self._files = files or Files()
        self._times = CheckpointSchedule(settings, clock)
        self._replay: ReplaySave | None = None
        self._comm: Comm = SINGLE_PROCESS
        self._prefix = ""  # of the parts' names
        self._foreign: Path | None = None  # continued by another number of ranks
        self._saved = (-1, -1)  # steps and updates
        self._unwritten: dict[str, _Policy] = {}  # by their names, to be tried again
        self._slow = False

    def attach(self, run: SavedRun, env: VectorEnv, agent: Agent) -> None:
        """Say what there is to save."""
        self._run, self._env, self._agent = run, env, agent

    def start(self) -> None:
        """Save the very beginning, so that from here on there is something to continue from."""
        if self._enabled:
            self.save(0, None)

    def go_on(self, changes: Sequence[str], step: int) -> None:
        """Save at once where settings were changed: what is killed now goes on with them.

        What it was continued from is the same state: its files are linked, and for its sake no
        other one is removed.
        """
        # A continued run stays in its directory, whichever one was asked for.
        if not self._enabled or all(change.startswith("run_dir=") for change in changes):
            return
        before = self.checkpoints.last
        if before is None or before == self._foreign:
            self.save(step, None)
            return
        self.checkpoints.settle()  # all ranks, before any of them reads it
        parts = [(name, Existing(before, name)) for name in parts_of(before, self._prefix)]
        metadata = {**manifest_metadata(before), **self._metadata}
        self.checkpoints.save(step, parts, metadata, prunes=False)

    @property
    def next(self) -> int | None:
        """The step at which there is something to do; 0 while every row is to be looked at."""
        return self._times.next if self._replay is None else 0

    def after_row(self, step: int, score: float | None, *, best: bool, asked: bool) -> None:
        """Save if it is time; let a save under way keep up with what is overwritten.

        What is `best` so far, or `asked` for, waits for the save under way.
        """
        if self._replay is not None:
            self._replay.wait_for_overwrite()
            if not self.checkpoints.busy:
                self._replay = None
        due = self._times.due(step) or self._times.overdue
        if asked or (best and self._enabled):
            self.save(step, score)
        elif due and self.checkpoints.busy:
            self._tell_of_slowness()
        elif due:
            self.save(step, score)

    def save(self, step: int, score: float | None) -> None:
        """Copy the run's state and write it in a thread; refuse weights that are not numbers."""
        # First, so that blocks are linked from what stays: a save under way removes older ones.
        self.checkpoints.settle()
        self._times.begin_anew()
        self._refuse_non_finite(step)
        state = self._agent.state_dict()
        parts: dict[str, Any] = {"run": self._run.state_dict(), "env": self._env.state_dict()}
        parts |= self._more()
        replay = self._agent.replay
        if replay is not None:
            state["replay"] = None
            if self._settings.replay:
                self._replay = ReplaySave(replay, self._blocks_of, self._prefix)
        # Some parts give views of memory that they go on writing to: what is written is a copy.
        parts["agent"] = give(state)
        metadata = {**self._metadata, "eval_return_mean": score, "replay": self._replay is not None}
        # The replay is let go of also by a save that fails before its first part.
        release = bool if self._replay is None else self._replay.close
        self.checkpoints.save(step, self._parts(parts, self._replay), metadata, release)
        self._saved = step, self._agent.updates
        if self._replay is not None:
            self._replay.wait_for_overwrite()  # the very next row may overwrite the oldest

    def _parts(self, parts: dict[str, Any], replay: ReplaySave | None) -> Iterator[tuple[str, Any]]:
        # Its rows first: training waits for those that it is about to overwrite.
        if replay is not None:
            yield from replay.parts()
        yield from ((self._prefix + name, part) for name, part in parts.items())

    def _more(self) -> dict[str, Any]:
        """Return further parts of a checkpoint."""
        return {}

    def finish(self, step: int, score: float | None) -> None:
        """Save the last state and wait until it is written; try again what failed before."""
        self.checkpoints.settle()
        is_saved = (step, self._agent.updates) == self._saved and self.checkpoints.failure is None
        if self._enabled and not is_saved:
            self.save(step, score)
        self.checkpoints.wait()
        self._replay = None
        for name, policy in [*self._unwritten.items()]:
            self._write_policy(name, policy)

    @property
    def lost(self) -> dict[str, str]:
        """What of the run's end could not be written, and why."""
        lost = {f"{name}/": policy.reason for name, policy in self._unwritten.items()}
        if self._enabled and self.checkpoints.failure is not None:
            lost = {CHECKPOINT: self.checkpoints.failure, **lost}
        return lost

    @property
    def continues(self) -> bool:
        """Whether there is a checkpoint to continue from."""
        return self.checkpoints.last is not None

    def _refuse_non_finite(self, step: int) -> None:
        if not finite(self._agent.weights()):
            raise NonFiniteError(f"the weights at step {step:,} are not finite: nothing was saved")

    @property
    def _blocks_of(self) -> Path | None:
        """The checkpoint whose blocks are this replay's too."""
        last = self.checkpoints.last
        whole = last is not None and last != self._foreign and last.is_dir()
        return last if whole else None

    @property
    def _enabled(self) -> bool:
        return bool(self._settings.every or self._settings.seconds)

    def _tell_of_slowness(self) -> None:
        if not self._slow:
            log.warning(
                "the disk takes longer to write a checkpoint than there is between two: "
                "some are left out; raise checkpoint.every or checkpoint.seconds"
            )
        self._slow = True

    def resume(self) -> int:
        """Take back the newest checkpoint that can be used; return its step."""
        checkpoints = self.checkpoints
        for saved in checkpoints.iter_valid(self._refuse):
            try:
                self._load(saved)
            except Exception as error:  # nobody knows what is in a file that only looks right
                if isinstance(error, ExpectedError) and not isinstance(
                    error, CheckpointError | NonFiniteError
                ):
                    raise
                log.debug("%s cannot be used", saved.path, exc_info=True)
                reason = str(error) if isinstance(error, CheckpointError) else describe(error)
                reason = f"{saved.path}: does not fit this run: {reason}"
                checkpoints.skipped[saved.path] = reason
                continue
            checkpoints.last = saved.path
            self._saved = saved.step, self._agent.updates
            self._times.due(saved.step)  # has been saved: the next one comes an interval later
            return saved.step
        raise AssertionError("usable() yields or raises")

    def remove_partial_writes(self) -> None:
        """Remove what a killed run had half written."""
        try:
            self.checkpoints.open()
            for name in (LAST, BEST):
                finish_replacing(self._files, self._directory / name)
        except OSError as error:
            log.warning("what is half written cannot be removed: %s", error.strerror or error)

    def last_valid(self) -> Path | None:
        """Return the newest whole checkpoint, once what is being written is."""
        self.checkpoints.wait()
        return self.checkpoints.last

    def _load(self, saved: Saved) -> None:
        prefix = self._prefix
        before = saved_ranks(saved.path)
        if before != self._comm.size:
            reshard(saved.path, before, self._comm, self._run, self._env, self._agent)
            self._foreign = saved.path
            return
        own = {**self._agent.state_dict(), "replay": None}
        most = SPARE + LARGER * nbytes_of(own)
        with _prefixed_by("agent"):
            self._agent.load_state_dict(read_part(saved.path, f"{prefix}agent", most=most))
        if self._agent.replay is not None:
            self._load_replay(saved.path, self._agent.replay)
        parts = {name: read_part(saved.path, f"{prefix}{name}") for name in ("env", "run")}
        with _prefixed_by("env"):
            _check_seed(parts["env"], self._env.state_dict())
            self._env.load_state_dict(parts["env"])
        with _prefixed_by("run"):
            self._run.load_state_dict(parts["run"])
            self._run.check_consistency(saved.step, self._env)

    def _load_replay(self, path: Path, replay: ReplayBuffer) -> None:
        try:
            load_replay(replay, path, self._prefix)
        except CheckpointError:
            if (path / f"{self._prefix}{METADATA}.json").exists():
                raise
            self._agent.drop_replay()
            log.warning(
                "the checkpoint was written without the replay: the run is not what it would "
                "have been, and learns again once enough is collected"
            )

    def _refuse(self, metadata: Mapping[str, Any]) -> None:
        wrong = differences(metadata, self._metadata, ("agent", "spec", "weights"))
        if wrong:
            raise CheckpointError(f"{self._directory}: is of another run: {wrong}")

    def write_policy(self, name: str, step: int, score: float | None) -> None:
        """Leave the weights of this moment where people look for them; a full disk is a warning.

        Those that do not fit are kept, and tried again at the end.
        """
        self._refuse_non_finite(step)
        metadata = {
            key: self._metadata[key] for key in ("agent", "spec", "weights", "versions", "config")
        }
        metadata |= {"step": step, "eval_return_mean": score}
        weights = {key: tensor.detach().cpu() for key, tensor in self._agent.weights().items()}
        if not self._write_policy(name, _Policy(weights, metadata)):
            copies = {key: tensor.clone() for key, tensor in weights.items()}
            self._unwritten[name] = self._unwritten[name]._replace(weights=copies)

    def _write_policy(self, name: str, policy: _Policy) -> bool:
        parts = [("policy", policy.weights)]
        try:
            replace_archive(self._files, self._directory / name, parts, policy.metadata)
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != policy.reason:  # else it was said
                log.warning("%s/ cannot be written: %s", name, reason)
            self._unwritten[name] = policy._replace(reason=reason)
            return False
        self._unwritten.pop(name, None)
        return True


@contextmanager
def _prefixed_by(part: str) -> Iterator[None]:
    """Name the part whose state is refused."""
    try:
        yield
    except ValueError as error:
        told = str(error)
        raise ValueError(told if told.startswith(f"{part}.") else f"{part}: {told}") from None


def _check_seed(saved: Any, own: Mapping[str, Any]) -> None:
    """Refuse environments that were seeded for another run."""
    theirs = SavedState(SavedState(saved, "env").raw("backend"), "env.backend")
    seed = own["backend"].get("seed")
    if "seed" in theirs and theirs.raw("seed") != seed:
        raise ValueError(f"backend.seed: is {theirs.raw('seed')!r:.40}, this run's is {seed}")
