"""The base class of callbacks, and what a callback sees of a run. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from steadyrl.core.errors import ExpectedError, one_line

if TYPE_CHECKING:
    from steadyrl.training.checkpoints.summary import Summary
    from steadyrl.training.evaluation.evaluator import Evaluation


class CallbackError(ExpectedError):
    """A callback raised, or its state cannot be saved."""

    exit_code = 4  # that of an environment's failure: both are the user's code


class RunControl:
    """What a callback sees of the run, and can do: log numbers, and stop it."""

    def __init__(self, directory: Path, total_steps: int, now: Callable[[], Summary]) -> None:
        self.directory, self.total_steps = directory, total_steps
        self.step = 0  # environment steps so far
        self.metrics: dict[str, float] = {}  # last logged values by tag, since the run was started
        self.pending: dict[str, float] = {}  # of `log`, not written yet
        self.stop_reason: str | None = None
        self._now = now

    @property
    def summary(self) -> Summary:
        """The run's summary at this moment; its status is running until `on_end`."""
        return self._now()

    @property
    def return_mean(self) -> float | None:
        """Mean return of the last training episodes; None before the first one ends."""
        return self.summary.return_mean

    def log(self, name: str, value: float) -> None:
        """Log a number as `callback/NAME` with the next log line or evaluation; the last counts."""
        try:
            self.pending[f"callback/{name}"] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: of a tensor
            reason = f"run.log({name!r}, …): {one_line(repr(value))} is not one number"
            raise TypeError(reason) from None

    def stop(self, reason: str = "") -> None:
        """End the run as finished after this step, with a last evaluation."""
        self.stop_reason = str(reason)

    def close(self) -> None:
        """Release the run, which has ended: a callback may keep this object."""
        final = self.summary
        self._now = lambda: final


class Callback:
    """Follows a run; override what is needed. With `state_dict` and `load_state_dict` it has state.

    The state (numbers, text, lists, dicts, arrays and tensors) is saved in the checkpoints. A
    method that returns False stops the run, as `run.stop()` does.
    """

    def on_start(self, run: RunControl) -> bool | None:
        """Before the first step; again when a run is resumed, after `load_state_dict`."""

    def on_step(self, run: RunControl) -> bool | None:
        """After each timestep of all environments, or after each block of a fused rollout."""

    def on_evaluation(self, run: RunControl, evaluation: Evaluation) -> bool | None:
        """After each evaluation, before its values are logged."""

    def on_checkpoint(self, run: RunControl) -> bool | None:
        """Before a checkpoint is saved, this callback's state included."""

    def on_end(self, run: RunControl) -> None:
        """Once the run has ended, however it did, and `summary.json` says how (its status)."""
