"""Save and resume a run: when checkpoints are written, what they hold, how one is loaded."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from steadyrl.agents.base import Agent
from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.core.clock import Interval, doing
from steadyrl.core.errors import (
    ExpectedError,
    MemoryBudgetError,
    NonFiniteError,
    describe,
    is_out_of_memory,
)
from steadyrl.core.files import Files
from steadyrl.core.saved_state import Saved
from steadyrl.core.state import Stateful, to_plain
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.checkpoints.archive import (
    Existing,
    finish_replacing,
    most_agent_bytes,
    read_part,
    replace_archive,
)
from steadyrl.training.checkpoints.manifest import (
    Checkpoint,
    CheckpointError,
    ShortOfMemoryError,
    differences,
    manifest_metadata,
    saved_at,
)
from steadyrl.training.checkpoints.plain import finite, nbytes_of
from steadyrl.training.checkpoints.replay_blocks import METADATA, ReplaySave, load_replay
from steadyrl.training.checkpoints.reshard import parts_of, reshard, saved_ranks
from steadyrl.training.checkpoints.resume import import_overrides
from steadyrl.training.checkpoints.run_directory import (
    BEST,
    CHECKPOINTS,
    LAST,
    resume_command,
    sync_history,
)
from steadyrl.training.checkpoints.store import Checkpoints
from steadyrl.training.checkpoints.unsaved import CHECKPOINT
from steadyrl.training.config.settings import CheckpointSettings

log = logging.getLogger("steadyrl")

# Keys of a run's metadata that the manifests of its policies repeat.
OF_POLICY = ("agent", "spec", "spaces", "weights", "versions", "config")


class SavedRun(Stateful):
    """The run's own part of a checkpoint: counters and histories."""

    @abstractmethod
    def check_consistency(self, step: int, env: VectorEnv) -> None:
        """Raise ValueError if the state contradicts the checkpoint's step or the environments."""

    def before_checkpoint(self) -> None:
        """Called before the state is copied."""


class CheckpointSchedule(Interval):
    """Due every N steps, every S seconds, or both."""

    def __init__(self, settings: CheckpointSettings) -> None:
        super().__init__(settings.every)
        self._seconds = settings.seconds
        self._next_save = float("inf")
        self.restart_timer()

    @property
    def overdue(self) -> bool:
        """Whether `checkpoint.seconds` have passed since the last save."""
        return time.monotonic() >= self._next_save

    def restart_timer(self) -> None:
        """Start the interval in seconds now."""
        if self._seconds:
            self._next_save = time.monotonic() + self._seconds


class _Policy(NamedTuple):
    """A policy that could not be written yet, and the reason."""

    weights: dict[str, Tensor]
    metadata: dict[str, Any]
    reason: str = ""


class Saver:
    """Write a run's checkpoints, in a thread, and its policies; restore a run that is resumed."""

    def __init__(
        self,
        settings: CheckpointSettings,
        directory: Path,
        metadata: Mapping[str, Any],
        *,
        files: Files | None = None,
    ) -> None:
        self.checkpoints = Checkpoints(directory / CHECKPOINTS, keep=settings.most, files=files)
        self._settings, self._directory, self._metadata = settings, directory, dict(metadata)
        self._files = files or Files()
        self._schedule = CheckpointSchedule(settings)
        self._replay: ReplaySave | None = None
        self._comm: Comm = SINGLE_PROCESS
        self._prefix = ""  # of part names: set per rank
        self._foreign: Path | None = None  # resumed checkpoint of another number of ranks
        self._saved = (-1, -1)  # steps and updates
        self._unwritten: dict[str, _Policy] = {}  # by name, retried at the end of the run
        self._slow = False

    def attach(self, run: SavedRun, env: VectorEnv, agent: Agent) -> None:
        """Set the objects whose state is saved."""
        self._run, self._env, self._agent = run, env, agent

    def start(self) -> None:
        """Save step 0, so that a run killed early can be resumed."""
        if self._enabled:
            self.save(0, None)

    def save_changes(self, changes: Sequence[str], step: int) -> None:
        """Save at once if a resumed run has changed settings, so that a kill does not lose them.

        The state equals the loaded checkpoint: its files are hard-linked, nothing is pruned.
        """
        before = self.checkpoints.last
        elsewhere = before is not None and before.parent != self.checkpoints.directory
        # A resumed run stays in its directory, whatever run_dir was given.
        same = all(change.startswith("run_dir=") for change in changes)
        if not self._enabled or (same and not elsewhere):
            return
        if before is None or before == self._foreign:
            self.save(step, None)
            return
        self.checkpoints.sync()  # on all ranks, before any of them reads it
        parts = [(name, Existing(before, name)) for name in parts_of(before, self._prefix)]
        metadata = {**manifest_metadata(before), **self._metadata}
        self.checkpoints.save(step, parts, metadata, prunes=False)

    @property
    def next(self) -> int | None:
        """The next step to call `after_step` at; 0: every step, while a replay is saved."""
        return self._schedule.next if self._replay is None else 0

    def after_step(self, step: int, score: float | None, *, best: bool, requested: bool) -> None:
        """Save if due; block while the replay would overwrite timesteps not yet written.

        A new `best` evaluation and a save `requested` by a signal wait for the save in progress.
        """
        self._wait_for_overwrite()
        due = self._schedule.pop_due(step) or self._schedule.overdue
        if requested or (best and self._enabled):
            self.save(step, score)
        elif due and self.checkpoints.busy:
            self._warn_disk_is_slow()
        elif due:
            self.save(step, score)

    def _wait_for_overwrite(self) -> None:
        if self._replay is not None:
            self._replay.wait_for_overwrite()
            if not self.checkpoints.busy:
                self._replay = None

    @doing("saving a checkpoint")
    def save(self, step: int, score: float | None) -> None:
        """Copy the state and write it in a thread; NonFiniteError if a weight is not finite."""
        # First, because a save in progress prunes checkpoints whose blocks could be linked.
        self.checkpoints.sync()
        self._schedule.restart_timer()
        self._validate_finite(step)
        self._run.before_checkpoint()
        state = self._agent.state_dict()
        parts: dict[str, Any] = {"run": self._run.state_dict(), "env": self._env.state_dict()}
        parts |= self._rank_parts()
        replay = self._agent.replay
        if replay is not None:
            state["replay"] = None
            if self._settings.replay:
                self._replay = ReplaySave(replay, self._blocks_of, self._prefix)
        # Copied: some parts return views of memory that training goes on writing to.
        parts["agent"] = to_plain(state)
        metadata = {**self._metadata, "eval_return_mean": score, "replay": self._replay is not None}
        # Also called if the save fails before its first part.
        release = bool if self._replay is None else self._replay.close
        self.checkpoints.save(step, self._parts(parts, self._replay), metadata, release)
        self._saved = step, self._agent.updates
        if self._replay is not None:
            self._replay.wait_for_overwrite()  # the next timestep may overwrite the oldest

    def _parts(self, parts: dict[str, Any], replay: ReplaySave | None) -> Iterator[tuple[str, Any]]:
        # The replay first: training blocks on timesteps it is about to overwrite.
        if replay is not None:
            yield from replay.parts()
        yield from ((self._prefix + name, part) for name, part in parts.items())
        if self._comm.rank == 0:
            # Before the manifest: a power cut must not leave a checkpoint without its metrics.
            sync_history(self._files, self._directory)

    def _rank_parts(self) -> dict[str, Any]:
        """Return the parts that only one of several ranks has."""
        return {}

    @doing("saving a checkpoint")
    def finish(self, step: int, score: float | None, *, changed: bool = False) -> None:
        """Save the final state and wait for it; retry policies that could not be written.

        `changed`: the state may have changed since it was saved at this step.
        """
        self.checkpoints.sync()
        is_saved = (step, self._agent.updates) == self._saved and self.checkpoints.failure is None
        if self._enabled and (changed or not is_saved):
            self.save(step, score)
        self.checkpoints.wait()
        self._replay = None
        for name, policy in [*self._unwritten.items()]:
            self._write_policy(name, policy)

    def finish_at_memory_limit(
        self, step: int, score: float | None, error: MemoryBudgetError
    ) -> MemoryBudgetError:
        """Save what can be saved; return the error with what could not be, and how to go on."""
        failed = ""
        try:
            self.finish(step, score)
            self.write_policy(LAST, step, score)
        except (MemoryError, OSError, RuntimeError) as full:  # torch's, too
            log.debug("the run at its memory limit cannot be saved", exc_info=True)
            failed = f"{CHECKPOINT}: {describe(full)}"
        lost = [failed] * bool(failed) + [f"{name}: {why}" for name, why in self.lost.items()]
        if lost:
            error.append(f"; could not be written: {'; '.join(lost)}")
        return error.with_details(*self.go_on(*error.overrides))

    @property
    def lost(self) -> dict[str, str]:
        """{name: reason} of final files that could not be written."""
        lost = {f"{name}/": policy.reason for name, policy in self._unwritten.items()}
        if self._enabled and self.checkpoints.failure is not None:
            lost = {CHECKPOINT: self.checkpoints.failure, **lost}
        return lost

    @property
    def continues(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.checkpoints.last is not None

    @property
    def last_step(self) -> int | None:
        """Step of the checkpoint to resume from; None: there is none."""
        last = self.checkpoints.last
        saved = None if last is None else saved_at(last)
        return saved and saved.step

    def resume_command(self, *overrides: str) -> str:
        """Return the command that resumes this run."""
        imported = import_overrides(self._metadata["config"])
        return resume_command(self._directory, *imported, *overrides)

    def go_on(self, *overrides: str) -> tuple[str, ...]:
        """Return the line below the error that ends a run: its resume command, if it has one."""
        return (f"go on: {self.resume_command(*overrides)}",) if self.continues else ()

    def _validate_finite(self, step: int) -> None:
        if not finite(self._agent.weights()):
            raise NonFiniteError(f"the weights at step {step:,} are not finite: nothing was saved")

    @property
    def _blocks_of(self) -> Path | None:
        """The last checkpoint, if its replay blocks can be linked."""
        last = self.checkpoints.last
        whole = last is not None and last != self._foreign and last.is_dir()
        return last if whole else None

    @property
    def _enabled(self) -> bool:
        return bool(self._settings.every or self._settings.seconds)

    def _warn_disk_is_slow(self) -> None:
        if not self._slow:
            log.warning(
                "writing a checkpoint takes longer than the interval between two: some are "
                "skipped; raise checkpoint.every or checkpoint.seconds"
            )
        self._slow = True

    def resume(self, checkpoint: Path | None = None) -> int:
        """Load `checkpoint`, or else the newest usable one; return its step."""
        checkpoints = self.checkpoints
        checkpoints.chosen = None if checkpoint is None else saved_at(checkpoint)
        for saved in checkpoints.iter_valid(self._refuse):
            try:
                self._load(saved)
            except Exception as error:  # its hashes are right, its content may be anything
                about_it = isinstance(error, CheckpointError | NonFiniteError)
                short = is_out_of_memory(error) or isinstance(error, ShortOfMemoryError)
                if short or (isinstance(error, ExpectedError) and not about_it):
                    raise
                log.debug("%s cannot be used", saved.path, exc_info=True)
                reason = str(error) if isinstance(error, CheckpointError) else describe(error)
                reason = f"{saved.path}: does not fit this run: {reason}"
                checkpoints.skipped[saved.path] = reason
                continue
            checkpoints.last = saved.path
            self._saved = saved.step, self._agent.updates
            self._schedule.pop_due(saved.step)  # already saved: next in one interval
            return saved.step
        raise AssertionError("iter_valid() yields or raises")

    def remove_partial_writes(self) -> None:
        """Remove files that a killed run left half written."""
        try:
            self.checkpoints.open()
            for name in (LAST, BEST):
                finish_replacing(self._files, self._directory / name)
        except OSError as error:
            log.warning("cannot remove partial writes of a killed run: %s", error.strerror or error)

    def last_valid(self) -> Path | None:
        """Wait for a save in progress; return the newest valid checkpoint."""
        self.checkpoints.wait()
        return self.checkpoints.last

    def _load(self, saved: Checkpoint) -> None:
        prefix = self._prefix
        before = saved_ranks(saved.path)
        if before != self._comm.size:
            reshard(saved.path, before, self._comm, self._run, self._env, self._agent)
            self._foreign = saved.path
            return
        own = {**self._agent.state_dict(), "replay": None}
        most = most_agent_bytes(nbytes_of(own))
        with _prefixed_by("agent"):
            self._agent.load_state_dict(read_part(saved.path, f"{prefix}agent", most=most))
        if self._agent.replay is not None:
            self._load_replay(saved.path, self._agent.replay)
        parts = {name: read_part(saved.path, f"{prefix}{name}") for name in ("env", "run")}
        with doing("restoring the environments"), _prefixed_by("env"):
            _check_seed(parts["env"], self._env.state_dict())
            self._env.load_state_dict(parts["env"])
        with _prefixed_by("run"):
            self._run.load_state_dict(parts["run"])
            self._run.check_consistency(saved.step, self._env)

    def _load_replay(self, path: Path, replay: ReplayBuffer) -> None:
        try:
            with doing("loading the replay"):
                load_replay(replay, path, self._prefix)
        except CheckpointError:
            if (path / f"{self._prefix}{METADATA}.json").exists():
                raise
            self._agent.drop_replay()
            log.warning(
                "the checkpoint has no replay: it starts empty, updates begin again after "
                "agent.learning_starts steps; results will differ from an uninterrupted run"
            )

    def _refuse(self, metadata: Mapping[str, Any]) -> None:
        there, here = map(_without_module, (metadata, self._metadata))
        wrong = differences(there, here, ("agent", "spec", "weights"))
        if wrong:
            raise CheckpointError(f"{self._directory}: is of another run: {wrong}")

    def write_policy(self, name: str, step: int, score: float | None) -> None:
        """Write the current weights as a policy; on failure warn and retry at the end."""
        self._validate_finite(step)
        metadata = {key: self._metadata[key] for key in OF_POLICY}
        metadata |= {"step": step, "eval_return_mean": score, "best": name == BEST}
        weights = {key: tensor.detach().cpu() for key, tensor in self._agent.weights().items()}
        reason = self._unwritten[name].reason if name in self._unwritten else ""
        if not self._write_policy(name, _Policy(weights, metadata, reason)):
            copies = {key: tensor.clone() for key, tensor in weights.items()}
            self._unwritten[name] = self._unwritten[name]._replace(weights=copies)

    def _write_policy(self, name: str, policy: _Policy) -> bool:
        parts = [("policy", policy.weights)]
        try:
            replace_archive(self._files, self._directory / name, parts, policy.metadata)
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != policy.reason:  # warned once per reason
                log.warning("%s/ cannot be written: %s", name, reason)
            self._unwritten[name] = policy._replace(reason=reason)
            return False
        self._unwritten.pop(name, None)
        return True


@contextmanager
def _prefixed_by(part: str) -> Iterator[None]:
    """Prefix a ValueError with the name of the part."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(f"{part}.") else f"{part}: {text}") from None


def _check_seed(saved: Any, own: Mapping[str, Any]) -> None:
    """Raise ValueError if the saved environments belong to another seed."""
    theirs = Saved(Saved(saved, "env").raw("backend"), "env.backend")
    seed = own["backend"].get("seed")
    if "seed" in theirs and theirs.raw("seed") != seed:
        raise ValueError(f"backend.seed: is {theirs.raw('seed')!r:.40}, this run's is {seed}")


def _without_module(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metadata that names the environment without the module that registers it."""
    spec = metadata.get("spec")
    if not (isinstance(spec, Mapping) and isinstance(spec.get("id"), str)):
        return metadata
    return {**metadata, "spec": {**spec, "id": spec["id"].rpartition(":")[2]}}
