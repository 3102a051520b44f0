"""The run loop of several ranks: counting, logging, evaluating and ending together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from typing_extensions import override

from steadyrl.agents.base import Agent, Decision
from steadyrl.core.clock import RateLimiter, Stopwatch
from steadyrl.core.errors import MemoryBudgetError
from steadyrl.core.metrics import Metrics
from steadyrl.envs.types import Step
from steadyrl.envs.vector import VectorEnv
from steadyrl.memory.process import MB, read_peak
from steadyrl.training.checkpoints.summary import Summary
from steadyrl.training.config.settings import RunSettings, Settings
from steadyrl.training.distributed.comm import Ranks
from steadyrl.training.distributed.saver import RankSaver
from steadyrl.training.evaluation.evaluator import Evaluation
from steadyrl.training.evaluation.video import VideoRecorder
from steadyrl.training.run.episode_counter import REWARD_MEAN
from steadyrl.training.run.run import Run
from steadyrl.training.run.services import RunEvaluator, RunServices

AVAILABLE = "memory/available_mb"  # the least of all ranks


class RankRun(Run):
    """The run of one rank: step counts are all-reduced, so all ranks do the same at each step."""

    def __init__(
        self,
        settings: Settings,
        agent: Agent,
        services: RunServices,
        summary: Summary,
    ) -> None:
        super().__init__(settings, agent, services, summary)
        ranks, saver = services.comm, services.saver
        assert isinstance(ranks, Ranks) and isinstance(saver, RankSaver)
        self._ranks, self._saver = ranks, saver
        self._stopwatch = Stopwatch(SharedRateLimiter(ranks))
        self._over = False  # a rank exceeded the memory budget: end after this step
        self._memory: dict[str, float] = {}
        self._peaks: dict[str, float] = {}  # MB, summed over ranks, by key of the summary
        self._cleanings, self._cleaned_mb = 0, 0.0  # likewise

    @property
    @override
    def done(self) -> bool:
        return self.steps >= self._total or self.signalled or self._over

    @property
    @override
    def cut_short(self) -> bool:
        return self.signalled  # ranks agree on the memory limit after the step

    @override
    def _must_stop(self) -> bool:
        return super()._must_stop() or self._memory_error is not None

    @override
    def sync_ranks(self, step: Step) -> int:
        """All-reduce a timestep's valid steps, and whether any rank stops or saves after it."""
        stop, saver = self._services.signals.stop, self._saver
        flags = (
            stop.local,
            saver.wants_save,
            saver.checkpoints.busy,
            self._memory_error is not None,
        )
        valid = int(np.count_nonzero(step.valid))
        found = self._ranks.sync_counts(valid, flags, now=self._agent.syncs_this_step)
        if found is not None:
            stops, saver.save_now, saver.still_writing, self._over = found
            if stops:
                stop.commit()
        return super().sync_ranks(step)

    @override
    def stash_pending_step(self, decision: Decision, step: Step, metrics: Metrics | None) -> None:
        self._ranks.uncount()
        super().stash_pending_step(decision, step, metrics)

    @override
    def complete(self) -> None:
        with self._ranks.long_operation():
            own = self._memory_error
            found = self._ranks.all_gather(own and (str(own), own.overrides))
            self._memory_error = own or next(
                (_of_rank(rank, *each) for rank, each in enumerate(found) if each), None
            )
            super().complete()
        self._ranks.heartbeat.end_steps()

    @override
    def fail(self, status: str) -> None:
        self._ranks.heartbeat.end_steps()
        super().fail(status)

    @override
    def _fill_summary(self) -> None:
        super()._fill_summary()
        s = self.summary
        for name, peak in self._peaks.items():
            setattr(s, name, max(peak, getattr(s, name) or 0.0))
        s.cleanings = max(self._cleanings, s.cleanings)
        s.cleaned_mb = max(self._cleaned_mb, s.cleaned_mb)

    @override
    def _scalars(self) -> dict[str, float]:
        """Collective: return rank 0's scalars, with memory and episodes over all ranks."""
        scalars = super()._scalars()
        # Ranks measure memory at different times: the sum is over each rank's latest values.
        self._memory |= {tag: v for tag, v in scalars.items() if is_summed(tag)}
        episodes = [self._episodes.count, self._episodes.scalars()]
        own = self._own_peaks(), self._services.watch.cleaned
        all_of_it = self._ranks.all_gather([self._memory, episodes, own])
        peaks = [peaks for _, _, (peaks, _) in all_of_it]
        self._peaks = {name: sum(each[name] for each in peaks) for name in peaks[0]}
        self._cleanings, self._cleaned_mb = (
            sum(each) for each in zip(*(cleaned for _, _, (_, cleaned) in all_of_it), strict=True)
        )
        for tag in scalars.keys() & self._memory.keys():
            found = [memory[tag] for memory, _, _ in all_of_it if tag in memory]
            scalars[tag] = combined(tag, found)
        return scalars | weighted([each for _, each, _ in all_of_it])

    def _own_peaks(self) -> dict[str, float]:
        """Return this rank's peaks in MB, by key of the summary; without a card, none of one."""
        peaks = self._services.watch.peaks()
        found = {"rss_mb_peak": read_peak() / MB, "tree_mb_peak": peaks.tree / MB}
        return found if peaks.cuda is None else {**found, "cuda_mb_peak": peaks.cuda / MB}


def _of_rank(rank: int, text: str, overrides: Sequence[str]) -> MemoryBudgetError:
    error = MemoryBudgetError(f"rank {rank}: {text}")
    error.overrides = tuple(overrides)
    return error


def is_summed(tag: str) -> bool:
    """Return whether a metric is summed over ranks.

    Memory, but not the replay's fill, a ratio; and the mean reward: each rank divides the sum of
    its own rewards by the steps of all.
    """
    memory = tag.startswith("memory/") and tag != "memory/replay_fill"
    return memory or tag == REWARD_MEAN


def combined(tag: str, values: Sequence[float]) -> float:
    """Return one value for a metric of `is_summed` from all ranks'."""
    if tag == AVAILABLE:
        return min(values)
    return fmean(values) if tag.endswith("_percent") else sum(values)


def weighted(parts: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Return the means over all ranks' episodes, from (count, means) of each rank."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for count, means in parts:
        for tag, mean in means.items():
            if math.isnan(mean):  # no episode of this rank reported it
                continue
            sums[tag] = sums.get(tag, 0.0) + count * mean
            counts[tag] = counts.get(tag, 0) + count
    return {tag: total / counts[tag] for tag, total in sums.items() if counts[tag]}


class SharedRateLimiter(RateLimiter):
    """Rate limiter that follows rank 0's clock."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    @override
    def allows(self, seconds: float) -> bool:
        """Collective: return whether rank 0's limiter allows it."""
        may: list[bool] = self._ranks.all_gather(super().allows(seconds))
        return may[0]


class SharedEvaluator:
    """Evaluates on rank 0 while the others wait."""

    def __init__(self, evaluator: RunEvaluator | None, ranks: Ranks) -> None:
        self._evaluator, self._ranks = evaluator, ranks

    def run(self, agent: Agent, stopped: Callable[[], bool]) -> Evaluation | None:
        """Collective: return the evaluation; None on all ranks if rank 0 was stopped before."""
        stop, found = agent.stop, None
        if self._evaluator is not None:
            with self._ranks.long_operation():
                found = self._evaluator.run(agent, lambda: stop.local or stopped())
        result = self._ranks.all_gather(found)[0]
        if result is None:
            stop.commit()
            return None
        returns, lengths, left_out = result
        return Evaluation(tuple(returns), tuple(lengths), left_out)


class SharedVideoRecorder(VideoRecorder):
    """Records videos on rank 0."""

    def __init__(self, video_recorder: VideoRecorder, ranks: Ranks) -> None:
        vars(self).update(vars(video_recorder))
        self._ranks = ranks

    @override
    def _next_after_resume(self, step: int) -> int | None:
        """Collective: return what rank 0 finds."""
        found = None if self._ranks.rank else super()._next_after_resume(step)
        due: int | None = self._ranks.all_gather(found)[0]
        return due

    @override
    def maybe_record(self, agent: Agent, step: int, stopped: Callable[[], bool]) -> bytes | None:
        """Record on rank 0, until it is asked to stop; the others go on and wait later."""
        if self._ranks.rank:
            self._due.pop_due(step)
            return None
        with self._ranks.long_operation():
            return super().maybe_record(agent, step, lambda: agent.stop.local or stopped())


def shared(
    services: RunServices, settings: RunSettings, metadata: Mapping[str, Any], env: VectorEnv
) -> RunServices:
    """Return the services with evaluation, saver and videos coordinated over all ranks."""
    ranks = services.comm
    assert isinstance(ranks, Ranks)
    ranks.heartbeat.watch_envs(lambda: env.responses, env.max_timeouts)
    path = services.directory.path
    evaluator = SharedEvaluator(services.evaluator, ranks) if settings.eval.every else None
    return services._replace(
        evaluator=evaluator,
        saver=RankSaver(settings.checkpoint, path, metadata, ranks=ranks),
        video_recorder=SharedVideoRecorder(services.video_recorder, ranks),
    )
