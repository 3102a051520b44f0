"""A training run: counts what is collected; evaluates, logs and saves when due; has a result.

`train.py` has the loop that drives it, `collector.py` one iteration of that loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from typing_extensions import override

from steadyrl.agents.base import Agent, Decision
from steadyrl.core.clock import Interval, Stopwatch
from steadyrl.core.errors import MemoryBudgetError
from steadyrl.core.metrics import MetricAccumulator, Metrics
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.envs.types import Step
from steadyrl.envs.vector import VectorEnv
from steadyrl.memory.process import MB, read_peak
from steadyrl.memory.watch import MemoryWatch
from steadyrl.training.callbacks.callback import RunControl
from steadyrl.training.callbacks.runner import Callbacks
from steadyrl.training.checkpoints.run_directory import BEST, LAST
from steadyrl.training.checkpoints.saver import SavedRun
from steadyrl.training.checkpoints.summary import Summary, weights_hash
from steadyrl.training.checkpoints.unsaved import UnsavedError
from steadyrl.training.config.settings import Settings
from steadyrl.training.evaluation.evaluator import Evaluation, how_early
from steadyrl.training.logging.terminal import score
from steadyrl.training.run.episode_counter import EpisodeCounter
from steadyrl.training.run.pending_step import PendingStep
from steadyrl.training.run.services import Collected, RunResult, RunServices
from steadyrl.training.speed.part_times import PartTimes
from steadyrl.training.speed.watch import SpeedWatch

log = logging.getLogger("steadyrl")

Result = TypeVar("Result")


class Run(SavedRun):
    """Counts collected steps; evaluates, logs, saves and stops when due."""

    state_names = (
        "steps",
        "summary",
        "_log_due",
        "_eval_due",
        "_metrics",
        "_episodes",
        "_stopwatch",
        "part_times",
        "_updates",
        "logged_step",
        "_pending",
        "callbacks",
    )
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(
        ("steps", "_updates", "logged_step"), COUNT
    )

    def __init__(
        self, settings: Settings, agent: Agent, services: RunServices, summary: Summary
    ) -> None:
        self.summary = summary
        self.steps = 0  # valid environment steps
        self._env_settings = settings.run.env
        self._agent = agent
        self._services = services
        self._total = settings.run.total_steps
        self._log_due = Interval(settings.run.log.every)
        self._eval_due = Interval(settings.run.eval.every if services.evaluator else 0)
        self._metrics = MetricAccumulator()
        memory, metrics = settings.run.memory, settings.run.env.info_metrics
        self._episodes = EpisodeCounter(memory.history, memory.mean_window, metrics)
        self._stopwatch = Stopwatch()
        self.part_times = PartTimes(memory.step_times, memory.collect_times)
        self._updates = 0  # gradient steps whose metrics are in `_metrics`
        self.logged_step = 0
        self.unsaved = False  # interrupted, and the checkpoint could not be written
        self._pending = PendingStep(next(iter(agent.weights().values())).device)
        control = RunControl(Path(summary.run_dir), self._total, self._live_summary)
        self.callbacks = Callbacks(services.callbacks, control)
        self._speed = SpeedWatch(
            memory.slowdown, self.part_times, self.callbacks, warns=not services.comm.rank
        )
        self._evaluation_to_announce: Evaluation | None = None  # to the callbacks
        self._score_now: float | None = None  # of these weights; None after an update
        self.best_unsaved = False  # the best evaluation so far is in no checkpoint yet
        # True without one, too: a run extended from the checkpoint before it evaluates again.
        self._final_evaluation_was_due = True
        self._memory_error: MemoryBudgetError | None = None  # ends the run after this step
        self._warned_of_omitted = False  # that evaluations score fewer episodes than configured
        self._read_total_reward: Callable[[], float] = lambda: 0.0
        self._decide: Callable[[], Decision] | None = None
        self._next_event = self._find_next_event()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, due in (("log_due", self._log_due), ("eval_due", self._eval_due)):
            was = state[name]["next"]
            if was is None or was > self.steps:  # nothing was due; the current interval counts
                due.load_state_dict({"next": self.steps + 1})
        self._next_event = self._find_next_event()

    def continue_schedules(self) -> None:
        """Find which video and report are due next, once every rank has its state back."""
        self._services.video_recorder.continue_at(self.steps)
        self._services.report_writer.continue_at(self.steps)
        self._next_event = self._find_next_event()

    @override
    def check_consistency(self, step: int, env: VectorEnv) -> None:
        """Raise ValueError unless run, agent and environments were saved at the same step."""
        if self.steps != step:
            raise ValueError(f"run.steps: is {self.steps}, the checkpoint is of step {step}")
        if not env.started:
            raise ValueError("env.started: they never were")
        self._pending.check_current(env.spec, env.observation)
        pending = self._pending.received
        only_decision = self._pending.content is not None and pending is None
        if only_decision and not self._agent.can_update_during_step:
            raise ValueError("pending.step: is missing; this agent learns after each step")
        self._agent.check_consistency(self.steps, pending, env.observation)

    def attach(self, env: VectorEnv, decide: Callable[[], Decision]) -> None:
        """Log the mean reward of these environments' steps; `decide` acts in them."""
        self._read_total_reward, self._decide = lambda: env.total_reward, decide

    def profile(self, methods: Mapping[str, Sequence[tuple[Any, str]]]) -> None:
        """Measure these methods, and the run's own, if `memory.profile` is on."""
        self._services.watch.profile(methods)
        self._services.watch.profile({"log": ((self, "on_steps"), (self, "_do_due_events"))})

    @property
    def done(self) -> bool:
        """Whether the loop ends: the last step, a callback, a signal or the memory limit."""
        return self._reached_end or self.cut_short

    @property
    def _reached_end(self) -> bool:
        """Whether all steps are done, or a callback has ended the run."""
        return self.steps >= self._total or self.callbacks.stopped_by is not None

    @property
    def signalled(self) -> bool:
        """Whether a signal asked the run to stop."""
        return self._services.signals.stop.confirmed

    @property
    def cut_short(self) -> bool:
        """Whether a signal or the memory limit ends the run; a resumed run does what is left."""
        return self.signalled or self._memory_error is not None

    @property
    def result(self) -> RunResult:
        """The summary, once the run has ended, and the command's exit code."""
        return RunResult(self.summary, self._exit_code, self._env_settings)

    @property
    def _exit_code(self) -> int:
        if self.unsaved:  # a signal's code promises a checkpoint to resume from
            return UnsavedError.exit_code
        signal = self._services.signals.received
        return 0 if signal is None or self.summary.status == "finished" else 128 + signal

    @property
    def event_due(self) -> bool:
        """Whether an evaluation, a log line, a video or a report of the current step is due."""
        return self.steps >= self._next_event

    @property
    def steps_until_next_event(self) -> int:
        """Steps until a report, a checkpoint or the end; 0 or less while every timestep counts."""
        # The best evaluation is saved a timestep later: not after more updates of a block.
        report, save = self._next_event, 0 if self.best_unsaved else self._services.saver.next
        return (report if save is None else min(report, save)) - self.steps

    def _find_next_event(self) -> int:
        """Return the step of the next log line, evaluation, video or report, or the last step."""
        services = self._services
        upcoming = [self._log_due.next, self._eval_due.next]
        upcoming += [services.video_recorder.next, services.report_writer.next]
        return min(step for step in [*upcoming, self._total] if step is not None)

    def sync_ranks(self, step: Step) -> int:
        """Return the valid steps of a timestep; several ranks agree here on saving and stopping."""
        return self._services.comm.global_count(step.valid)

    def stash_pending_step(self, decision: Decision, step: Step, metrics: Metrics | None) -> None:
        """Keep a step that is not observed yet: the run is to stop, and earlier work is not done.

        So a resumed run does everything in the order of an uninterrupted one.
        """
        if not self.event_due:  # else it was read when the report began, before this step
            self._update_total_reward()
        self._pending.content = decision, step
        self._on_update(metrics)

    def pop_pending_step(self) -> tuple[Decision, Step | None] | None:
        """Do what was due before the pending step, then return that step; None if there is none."""
        if self._pending.received is not None or not self._agent.can_update_during_step:
            self._update_agent()
        if self._pending.received is not None and self.event_due:
            self.evaluate_and_log()
        if self.cut_short:
            return None  # it stays pending
        pending, self._pending.content = self._pending.content, None
        return pending

    def on_steps(self, collected: Collected) -> None:
        """Count what was collected; save where that is due."""
        before, self.steps = self.steps, self.steps + collected.steps
        self._on_update(collected.metrics)
        self._services.progress.on_steps(self.steps, self._agent.updates)
        self._services.signals.on_timestep(ended=bool(collected.episodes))
        if collected.episodes:
            self._with_watch(lambda watch: watch.on_episodes(len(collected.episodes)))
            for after, episode in collected.episodes:
                self._episodes.append(before + after, episode)
            self.summary.episodes += len(collected.episodes)
        if self.callbacks:  # before saving: their state is that after this step
            self.callbacks.notify("on_step", self.steps)
        self._with_watch(lambda watch: watch.check())
        self._save_if_due()

    def _save_if_due(self) -> None:
        signals, saver = self._services.signals, self._services.saver
        requested = self._services.watch.pop_save_request()
        if signals.save_requested:  # reset only if it was seen: SIGUSR1 may come at any time
            requested, signals.save_requested = True, False
        signals.saving = True  # no time limit: it takes as long as the disk takes
        saver.after_step(self.steps, self._score_now, best=self.best_unsaved, requested=requested)
        signals.saving = False
        if self.best_unsaved and not self._agent.can_update_during_step:
            self._update_agent()  # which waited: the checkpoint has the weights evaluated
        self.best_unsaved = False

    @override
    def before_checkpoint(self) -> None:
        self.callbacks.notify("on_checkpoint", self.steps)

    def evaluate_and_log(self) -> None:
        """Do the updates due by now; then evaluate, log and record a video, as far as they are due.

        If a signal interrupts, what is left stays due.
        """
        self._update_total_reward()
        self._update_agent()
        self._do_due_events()
        self._services.signals.reinstall()
        self._next_event = self._find_next_event()

    def _do_due_events(self) -> None:
        scalars: dict[str, float] = {}
        if self._eval_due.is_due(self.steps):
            scalars |= self._evaluate()
        if self.cut_short:
            return
        self._eval_due.pop_due(self.steps)
        self._show_evaluation()
        if self._log_due.pop_due(self.steps) and self._stopwatch.may_log():
            scalars |= self._scalars()
        if scalars:
            self._write(scalars)
        self._record_video()
        with self._stopwatch.pause():
            self._services.report_writer.maybe_write(self.steps)

    def _evaluate(self) -> dict[str, float]:
        assert self._services.evaluator is not None
        with self._stopwatch.pause():
            result = self._services.evaluator.run(self._agent, self._must_stop)
        if result is None:
            return {}
        self._on_evaluation(result)
        self._evaluation_to_announce = result
        log.info(
            "evaluation at step %s%s: return %s ± %s (std) over %d episodes",
            f"{self.steps:,}",
            how_early(self.steps, self._total, self._agent.updates),
            score(result.mean),
            score(result.std),
            result.episodes,
        )
        if result.remark and not self._warned_of_omitted:
            log.warning("evaluation: %s", result.remark)
            self._warned_of_omitted = True
        return {"eval/return_mean": result.mean, "eval/return_std": result.std}

    def _must_stop(self) -> bool:
        """Return whether an evaluation is to end; it may take, or leak, much memory itself."""
        self._with_watch(lambda watch: watch.check())
        return self.cut_short

    def _on_evaluation(self, result: Evaluation) -> None:
        self._score_now = result.mean
        if self.summary.add_evaluation(result.mean, result.std, result.episodes):
            self.best_unsaved = True
            self._services.saver.write_policy(BEST, self.steps, result.mean)

    def _show_evaluation(self) -> None:
        """Pass an evaluation to the callbacks, once no signal can cause it to be repeated."""
        found, self._evaluation_to_announce = self._evaluation_to_announce, None
        if found is not None:
            self.callbacks.notify("on_evaluation", self.steps, found)

    def _record_video(self) -> None:
        recorder = self._services.video_recorder
        with self._stopwatch.pause():
            gif = recorder.maybe_record(self._agent, self.steps, self._must_stop)
        if gif is not None:
            self._services.logger.write_video(self.steps, gif)

    def _scalars(self) -> dict[str, float]:
        steps = self.steps - self._stopwatch.steps  # of the interval
        speed, updates = self._stopwatch.speed(self.steps, self._agent.updates)
        scalars = {"time/steps_per_second": speed, "time/updates_per_second": updates}
        scalars |= self._episodes.pop_reward_mean(steps)
        scalars |= self._with_watch(lambda watch: watch.measure(self.steps)) or {}
        scalars |= self._episodes.scalars() | self._agent.scalars()
        scalars |= self._speed.on_log(self.steps, speed, self._stopwatch, scalars)
        scalars |= self.part_times.means()
        return scalars | self._metrics.flush(check_step=self.steps)

    def _write(self, scalars: dict[str, float]) -> None:
        self._services.progress.report(self.steps, scalars)
        self._services.directory.validate_exists()
        scalars = self.callbacks.complete(scalars)
        seconds = self._stopwatch.seconds
        self._services.logger.write(self.steps, scalars, seconds, *self._episodes.pop_new())
        self.logged_step = self.steps

    def _update_total_reward(self) -> None:
        """Read the environments' total, unless they are a step ahead of the steps counted."""
        if self._pending.received is None:
            self._episodes.total_reward = self._read_total_reward()

    def _update_agent(self) -> None:
        """Do the updates that are due."""
        self._on_update(self.part_times.timed_update(self._agent))

    def _on_update(self, metrics: Metrics | None) -> None:
        if metrics is None:
            return
        self._metrics.add(metrics)
        self._score_now = None
        before, self._updates = self._updates, self._agent.updates
        self._with_watch(lambda watch: watch.on_update(self._updates - before))
        if not self._agent.can_update_during_step:
            self._with_watch(lambda watch: watch.on_rollout())
        self._speed.on_update(self.steps, self._updates, self._stopwatch)

    def _with_watch(self, event: Callable[[MemoryWatch], Result]) -> Result | None:
        """Call the memory watch; its MemoryBudgetError ends the run after this step."""
        try:
            return event(self._services.watch)
        except MemoryBudgetError as error:
            self._memory_error = self._memory_error or error
            return None

    def complete(self) -> None:
        """Evaluate and log a last time, unless the run is to stop; save; fill in the summary."""
        self._services.signals.cancel_timeout()
        self._update_total_reward()
        finished = self._reached_end and self._memory_error is None and self._final_evaluation()
        if finished:
            self.summary.stopped_by = self.callbacks.pop_stop()
        self._services.signals.saving = True  # to the end of the run
        exceeded = self._save_last(finished=finished)
        self._pending.content = self._decide = None  # release the actor and its observations
        if not finished and self.steps > self.logged_step:
            self._write(self._scalars())  # after saving: a resumed run drops this line again
        if exceeded is not None:
            raise exceeded
        self._services.saver.write_policy(LAST, self.steps, self._score_now)
        self.summary.status = "finished" if finished else "interrupted"
        self._fill_summary()
        if self.summary.stopped_by is not None:
            log.info("stopped by %s", self.summary.stopped_by)

    def _final_evaluation(self) -> bool:
        """Do the last updates, evaluate and log; return False where a signal interrupts that."""
        ahead = self._agent.can_update_during_step and self._pending.content is None
        if ahead and self._decide is not None:
            # Updates come after the next decision, as in the loop: a resumed run begins with it.
            self._pending.content = self._decide(), None
        self._update_agent()
        if self.signalled:
            return False
        evaluated = self._evaluate() if self._services.evaluator is not None else {}
        if self.cut_short:
            return False
        self._show_evaluation()
        if self.steps > self.logged_step:
            self._write(evaluated | self._scalars())
        # Nothing of this step is due any more, if the run is resumed for longer.
        self._log_due.pop_due(self.steps)
        self._final_evaluation_was_due = self._eval_due.pop_due(self.steps) or not evaluated
        self._record_video()
        return True

    def _save_last(self, *, finished: bool) -> MemoryBudgetError | None:
        """Save the final state; return the memory error that ends the run, with what was lost."""
        saver, exceeded = self._services.saver, self._memory_error
        if exceeded is not None:
            return saver.finish_at_memory_limit(self.steps, self._score_now, exceeded)
        # By the last evaluation, which comes after a checkpoint that was due at this step.
        changed = bool(self.callbacks) or self.best_unsaved or not self._final_evaluation_was_due
        saver.finish(self.steps, self._score_now, changed=finished and changed)
        return None

    def fail(self, status: str) -> None:
        """Fill in the summary of a run that ends by an error or at once."""
        self.summary.status = status
        self._fill_summary()

    def _fill_summary(self) -> None:
        # A device that failed, or is out of memory, may not give the weights any more.
        with suppress(RuntimeError, MemoryError):
            self.summary.weights_sha256 = weights_hash(self._agent.weights())
        s, watch = self.summary, self._services.watch
        peaks, nearest = watch.peaks(exact=True), watch.nearest_limit()
        s.rss_mb_peak, s.tree_mb_peak = read_peak() / MB, peaks.tree / MB
        s.cuda_mb_peak = None if peaks.cuda is None else peaks.cuda / MB
        s.memory_limit = None if nearest is None else nearest.bound.name
        self._update_summary()

    def _live_summary(self) -> Summary:
        """Return the summary for callbacks: until the run has ended, a copy of its numbers now."""
        if self.callbacks.ended:
            return self.summary
        self._update_summary()
        return replace(self.summary, status="running")

    def _update_summary(self) -> None:
        s = self.summary
        s.wall_seconds = self._stopwatch.seconds
        s.steps_per_second = self.steps / max(self._stopwatch.training, 1e-9)
        s.steps, s.updates = self.steps, self._agent.updates
        s.cleanings, s.cleaned_mb = self._services.watch.cleaned
        s.return_mean = self._episodes.return_mean
        self._speed.fill(s, self._stopwatch)
