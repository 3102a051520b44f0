"""What a run works with (logger, evaluator, saver, signals, memory, ranks), gets and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from steadyrl.agents.base import Agent
from steadyrl.agents.learner.comm import Comm
from steadyrl.core.metrics import Metrics
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import Episode
from steadyrl.memory.watch import MemoryWatch
from steadyrl.training.callbacks.callback import Callback
from steadyrl.training.checkpoints.run_directory import RunDirectory
from steadyrl.training.checkpoints.saver import Saver
from steadyrl.training.checkpoints.summary import Summary
from steadyrl.training.evaluation.evaluator import Evaluation
from steadyrl.training.evaluation.video import VideoRecorder
from steadyrl.training.logging.display import Display
from steadyrl.training.logging.logger import Logger, log_name
from steadyrl.training.mirror.mirror import NoMirror
from steadyrl.training.report.writer import ReportWriter
from steadyrl.training.run.signals import StopSignals

if TYPE_CHECKING:
    from steadyrl.training.policies.loaded import LoadedPolicy


class RunEvaluator(Protocol):
    """Evaluates the greedy policy."""

    def run(self, agent: Agent, stopped: Callable[[], bool]) -> Evaluation | None:
        """Return the greedy policy's returns; None if stopped before all episodes ended."""


class RunServices(NamedTuple):
    """What a run logs, evaluates, saves and records with, and what can stop it."""

    directory: RunDirectory
    logger: Logger
    progress: Display
    evaluator: RunEvaluator | None
    signals: StopSignals
    watch: MemoryWatch
    saver: Saver
    video_recorder: VideoRecorder
    report_writer: ReportWriter
    comm: Comm
    callbacks: Sequence[Callback]
    mirror: NoMirror

    @property
    def log_file(self) -> Path:
        """The log file of this rank."""
        return self.directory.path / log_name(self.comm.rank)


class Collected(NamedTuple):
    """What one call of a collector brings to the run."""

    steps: int  # valid environment steps, of all ranks
    episodes: tuple[tuple[int, Episode], ...]  # of this rank: after how many of `steps`, and which
    metrics: Metrics | None  # of the updates meanwhile, if any


@dataclass(frozen=True)
class RunResult:
    """What `train` returns."""

    summary: Summary
    exit_code: int  # 0, or the signal's, or 9 if its checkpoint could not be written
    env: EnvSettings

    @property
    def score(self) -> float | None:
        """Mean return of the last evaluation, which sweeps maximise; None without one."""
        return self.summary.eval_return_mean

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return Path(self.summary.run_dir)

    @cached_property
    def policy(self) -> LoadedPolicy:
        """The last policy, loaded from the run's directory at the first access."""
        from steadyrl.training.policies.loaded import load_policy

        return load_policy(self.directory, best=False, overrides=(), seed=0, named=self.env)
