"""One training run around the loop: counters, logs, evaluations, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from typing_extensions import override

from steadyrl.agents.base import Agent, Decision
from steadyrl.core.clock import Interval, Stopwatch
from steadyrl.core.errors import MemoryBudgetError
from steadyrl.core.metrics import MetricAccumulator, Metrics
from steadyrl.core.saved import COUNT, Limits
from steadyrl.envs.types import Rows, Step
from steadyrl.envs.vector import VectorEnv
from steadyrl.memory.process import MB, read_peak
from steadyrl.memory.profile import block
from steadyrl.memory.watch import MemoryWatch
from steadyrl.training.checkpoints.run_directory import BEST, LAST
from steadyrl.training.checkpoints.saver import SavedRun
from steadyrl.training.checkpoints.summary import Summary, weights_hash
from steadyrl.training.checkpoints.unsaved import UnsavedError
from steadyrl.training.config.settings import Settings
from steadyrl.training.evaluation.evaluator import Evaluation
from steadyrl.training.logging.terminal import Status, score
from steadyrl.training.run.episode_counter import Episodes
from steadyrl.training.run.pending_step import KeptRow
from steadyrl.training.run.services import Instruments

log = logging.getLogger("steadyrl")

Result = TypeVar("Result")


class Run(SavedRun):
    """Count what happens in the loop and do what is due: log, evaluate, stop."""

    state_names = (
        "steps",
        "summary",
        "_log_due",
        "_eval_due",
        "_metrics",
        "_episodes",
        "_stopwatch",
        "_updates",
        "logged_step",
        "_kept",
    )
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(
        ("steps", "_updates", "logged_step"), COUNT
    )

    def __init__(
        self, settings: Settings, agent: Agent, instruments: Instruments, summary: Summary
    ) -> None:
        self.summary = summary
        self.steps = 0  # valid environment steps
        self._agent = agent
        self._instruments = instruments
        self._total = settings.run.total_steps
        self._log_due = Interval(settings.run.log.every)
        self._eval_due = Interval(settings.run.eval.every if instruments.evaluator else 0)
        self._metrics = MetricAccumulator()
        self._episodes = Episodes(settings.run.memory.history, settings.run.env.info_metrics)
        self._stopwatch = Stopwatch()
        self._updates = 0  # that the metrics hold
        self.logged_step = 0
        self.unsaved = False  # a signal cut it short, and its checkpoint could not be written
        self._kept = KeptRow(next(iter(agent.weights().values())).device)
        self._score: float | None = None  # of these very weights, where they were evaluated
        self._is_best = False  # and they are better than all before, and not saved yet
        self._problem: MemoryBudgetError | None = None  # what ends the run after this row
        self._said_left_out = False  # that evaluations score fewer episodes than asked for
        self._next = self._next_event()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, due in (("log_due", self._log_due), ("eval_due", self._eval_due)):
            was = state[name]["next"]
            if was is None or was > self.steps:  # nothing of before is due; what counts is set now
                due.load_state_dict({"next": self.steps + 1})
        self._instruments.filmer.continue_at(self.steps)
        self._next = self._next_event()

    @override
    def check_consistency(self, step: int, env: VectorEnv) -> None:
        """Raise ValueError where run, agent and environments are not of one moment."""
        if self.steps != step:
            raise ValueError(f"run.steps: is {self.steps}, the checkpoint is of step {step}")
        if not env.started:
            raise ValueError("env.started: they never were")
        self._kept.check_current(env.spec, env.observation)
        self._agent.check_consistency(self.steps, self._kept.row, env.observation)

    @property
    def done(self) -> bool:
        """Whether the loop should end: all steps done, or asked to stop."""
        return self.steps >= self._total or self.stopped or self._problem is not None

    @property
    def stopped(self) -> bool:
        """Whether somebody asked the run to end."""
        return self._instruments.signals.stop.requested

    @property
    def due(self) -> bool:
        """Whether these steps are to be logged or evaluated before the next row."""
        return self.steps >= self._next

    @property
    def exit_code(self) -> int:
        """What the process should end with: 0, or the code of the signal that cut the run short.

        Of one that could not be saved, that code would promise too much.
        """
        if self.unsaved:
            return UnsavedError.exit_code
        signal = self._instruments.signals.received
        return 0 if signal is None or self.summary.status == "finished" else 128 + signal

    def agree(self, step: Step) -> None:
        """Do nothing: ranks count the row here, and agree on what comes after it."""

    def learn(self) -> None:
        """Learn what is due: nothing, unless these steps are special or a signal cut it short."""
        with block("update"):
            self._learned(self._agent.update())

    def keep(self, decision: Decision, step: Step, metrics: Metrics | None) -> None:
        """Keep a row for later: a signal came, and what is due before it may not be done."""
        self._kept.row = decision, step
        self._learned(metrics)

    def kept(self) -> tuple[Decision, Step] | None:
        """Do what was due before the row that a signal cut short; return that row, if it is done.

        So a run that is continued does everything in the order of one that was not interrupted:
        who learns while the environments step decides first what they are to do.
        """
        if self._kept.row is not None or not self._agent.overlaps:
            self.learn()
        if self._kept.row is not None and self.due:
            self.report()
        return None if self.stopped else self._kept.row

    @property
    def left(self) -> int:
        """How many steps may be made before something is due; none or less: a row is."""
        upcoming, saving = self._next, self._instruments.saver.next
        return (upcoming if saving is None else min(upcoming, saving)) - self.steps

    def record(self, made: Step | Rows, metrics: Metrics | None) -> None:
        """Count a row, or many, and what was learned meanwhile."""
        if isinstance(made, Rows):
            steps, episodes = made
        else:
            steps = self._instruments.world.counted(made.valid)
            episodes = tuple((steps, episode) for episode in made.episodes)
        self._kept.row = None
        before, self.steps = self.steps, self.steps + steps
        self._learned(metrics)
        self._stopwatch.row(self.steps, self._agent.updates)
        if episodes:
            self._watch(lambda watch: watch.on_episodes(len(episodes)))
            for after, episode in episodes:
                self._episodes.append(before + after, episode)
            self.summary.episodes += len(episodes)
        asked, signals = False, self._instruments.signals
        if signals.save_requested:
            asked, signals.save_requested = True, False
        score = self.summary.best_eval_return_mean if self._is_best else self._score
        signals.saving = True  # or waiting until it may
        self._instruments.saver.after_row(self.steps, score, best=self._is_best, asked=asked)
        signals.saving = self._is_best = False

    def report(self) -> None:
        """Learn what these steps made due, so that it is what gets evaluated and logged.

        If a signal comes meanwhile, the rest of it stays due.
        """
        self.learn()
        with block("log"):
            scalars: dict[str, float] = {}
            if self._eval_due.reached(self.steps):
                scalars |= self._evaluate()
            if self.stopped:
                return
            self._eval_due.due(self.steps)
            if self._log_due.due(self.steps) and self._stopwatch.lets_pass():
                scalars |= self._scalars()
            if scalars:
                self._write(scalars)
            self._film()
        self._next = self._next_event()

    def _learned(self, metrics: Metrics | None) -> None:
        if metrics is None:
            return
        self._metrics.add(metrics)
        self._score = None
        before, self._updates = self._updates, self._agent.updates
        self._watch(lambda watch: watch.on_update(self._updates - before))
        if not self._agent.overlaps:
            self._watch(lambda watch: watch.on_rollout())

    def _watch(self, tell: Callable[[MemoryWatch], Result]) -> Result | None:
        """Tell the memory watch something; its objection ends the run once the row is whole."""
        try:
            return tell(self._instruments.watch)
        except MemoryBudgetError as error:
            self._problem = self._problem or error
            return None

    def finish(self) -> None:
        """Learn, evaluate and log what is left, unless asked to stop; save; close the summary."""
        self._instruments.signals.reached()
        whole = self.steps >= self._total and self._problem is None and self._last_words()
        self._instruments.signals.saving = True
        self._instruments.saver.finish(self.steps, self._score)
        if not whole and self.steps > self.logged_step:
            self._write(self._scalars())  # after saving: a run that goes on takes it back
        if self._problem is not None:
            raise self._problem
        self._instruments.saver.write_policy(LAST, self.steps, self._score)
        self._instruments.signals.saving = False
        self.summary.status = "finished" if whole else "interrupted"
        self._close()

    def _last_words(self) -> bool:
        """Learn what is due, evaluate and log; false where a signal comes first."""
        self.learn()
        if self.stopped:
            return False
        evaluated = self._evaluate() if self._instruments.evaluator is not None else {}
        if self.stopped:
            return False
        if self.steps > self.logged_step:
            self._write(evaluated | self._scalars())
        # What these steps made due is done, should the run go on one day.
        self._log_due.due(self.steps)
        self._eval_due.due(self.steps)
        self._film()
        return True

    def fail(self, status: str) -> None:
        """Write down how far a run came that ends in an error."""
        self.summary.status = status
        self._close()

    def _close(self) -> None:
        s = self.summary
        # After a failure of the device, or of memory, there may be no weights to read.
        with suppress(RuntimeError, MemoryError):
            s.weights_sha256 = weights_hash(self._agent.weights())
        s.wall_seconds = self._stopwatch.seconds
        s.steps_per_second = self.steps / max(self._stopwatch.training, 1e-9)
        s.steps = self.steps
        s.updates = self._agent.updates
        s.return_mean = self._episodes.return_mean
        s.rss_mb_peak = read_peak() / MB

    def _next_event(self) -> int:
        upcoming = (self._log_due.next, self._eval_due.next, self._instruments.filmer.next)
        return min(step for step in (*upcoming, self._total) if step is not None)

    def _write(self, scalars: dict[str, float]) -> None:
        self._instruments.directory.refuse_lost()
        seconds = self._stopwatch.seconds
        self._instruments.logger.write(self.steps, scalars, seconds, *self._episodes.show())
        self.logged_step = self.steps

    def _evaluate(self) -> dict[str, float]:
        assert self._instruments.evaluator is not None
        with self._stopwatch.pause():
            result = self._instruments.evaluator.run(self._agent, lambda: self.stopped)
        if result is None:
            return {}
        self._note(result)
        log.info(
            "evaluation at step %s: return %s ± %s over %d episodes",
            f"{self.steps:,}",
            score(result.mean),
            score(result.std),
            result.episodes,
        )
        if result.remark and not self._said_left_out:
            log.warning("evaluation: %s", result.remark)
            self._said_left_out = True
        return {"eval/return_mean": result.mean, "eval/return_std": result.std}

    def _film(self) -> None:
        with self._stopwatch.pause():
            gif = self._instruments.filmer.shoot(self._agent, self.steps, lambda: self.stopped)
        if gif is not None:
            self._instruments.logger.film(self.steps, gif)

    def _note(self, result: Evaluation) -> None:
        s = self.summary
        s.eval_return_mean, s.eval_return_std = result.mean, result.std
        s.eval_episodes = result.episodes
        self._score, best = result.mean, s.best_eval_return_mean
        if best is None or result.mean > best:
            s.best_eval_return_mean = result.mean
            self._is_best = True
            self._instruments.saver.write_policy(BEST, self.steps, result.mean)

    def _scalars(self) -> dict[str, float]:
        speed, updates = self._stopwatch.speed(self.steps, self._agent.updates)
        scalars = {"time/steps_per_second": speed, "time/updates_per_second": updates}
        scalars |= self._watch(lambda watch: watch.measure(self.steps)) or {}
        scalars |= self._episodes.scalars() | self._agent.scalars()
        scalars |= self._metrics.flush(check_step=self.steps)
        self._instruments.progress.show(
            Status(
                self.steps,
                speed,
                scalars.get("rollout/return_mean"),
                scalars.get("memory/rss_mb", 0.0),
                self._stopwatch.outlook(self.steps, self._agent.updates),
            )
        )
        return scalars
