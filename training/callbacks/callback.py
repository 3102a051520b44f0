"""The base class of callbacks, and what a callback sees of a run. Imports nothing slow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steadyrl.core.errors import ExpectedError

if TYPE_CHECKING:
    from steadyrl.training.checkpoints.summary import Summary
    from steadyrl.training.evaluation.evaluator import Evaluation


class CallbackError(ExpectedError):
    """A callback raised, or its state cannot be saved."""

    exit_code = 4  # that of an environment's failure: both are the user's code


class RunControl:
    """What a callback sees of the run, and can do: log numbers, and stop it."""

    def __init__(self, directory: Path, total_steps: int, summary: Summary) -> None:
        self.directory, self.total_steps, self.summary = directory, total_steps, summary
        self.step = 0  # environment steps so far
        self.metrics: dict[str, float] = {}  # not written yet
        self.stop_reason: str | None = None

    def log(self, name: str, value: float) -> None:
        """Log a number as `callback/NAME` with the next log line or evaluation; the last counts."""
        self.metrics[f"callback/{name}"] = float(value)

    def stop(self, reason: str = "") -> None:
        """End the run as finished after this step, with a last evaluation."""
        self.stop_reason = str(reason)


class Callback:
    """Follows a run; override what is needed. With `state_dict` and `load_state_dict` it has state.

    The state (numbers, text, lists, dicts, arrays and tensors) is saved in the checkpoints.
    """

    def on_start(self, run: RunControl) -> None:
        """Before the first step; again when a run is resumed, after `load_state_dict`."""

    def on_step(self, run: RunControl) -> None:
        """After each timestep of all environments, or after each block of a fused rollout."""

    def on_evaluation(self, run: RunControl, evaluation: Evaluation) -> None:
        """After each evaluation, before its values are logged."""

    def on_checkpoint(self, run: RunControl) -> None:
        """Before a checkpoint is saved, this callback's state included."""

    def on_end(self, run: RunControl) -> None:
        """Once the run has ended, however it did: `run.summary.status` says it."""
