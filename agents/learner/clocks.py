"""When updates are due: after a rollout, or every few steps.

Clocks count valid environment steps, so they do not depend on the number of environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar

from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.schedules import Schedule
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful

if TYPE_CHECKING:
    from steadyrl.buffers.rollout.buffer import RolloutBuffer


class RolloutClock(Stateful):
    """Count valid environment steps; fix what depends on them as a rollout begins."""

    state_names: ClassVar[tuple[str, ...]] = ("steps", "_steps_at_rollout_start")
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(state_names, COUNT)

    def __init__(
        self, rollout_size: int, *, rate: Schedule, scalars: tuple[Schedule, ...] = ()
    ) -> None:
        """`rate`: learning rate; `scalars`: what the loss takes after the batch."""
        self._rollout_size = rollout_size  # timesteps · environments
        self._schedules = rate, *scalars
        self.comm: Comm = SINGLE_PROCESS
        self.steps = self._steps_at_rollout_start = 0

    def attach_comm(self, comm: Comm) -> None:
        """Count the steps of all ranks."""
        self.comm = comm

    @property
    def in_first_rollout(self) -> bool:
        """Whether nothing has been learned from yet."""
        return self._steps_at_rollout_start == 0

    def begin_rollout(self) -> None:
        """Begin a rollout at this step."""
        self._steps_at_rollout_start = self.steps

    def at_rollout_start(self, schedule: Schedule) -> float:
        """Return a schedule's value for this rollout, from the steps at its start.

        So the first update uses the initial value and, after k of K rollouts, linear annealing
        gives 1 − k/K (Huang et al. 2022, detail 4). A warm-up also counts the rollout's own steps.
        """
        ahead = self._rollout_size * self.comm.size
        return schedule.at(self._steps_at_rollout_start, ahead=ahead)

    def rate_and_scalars(self) -> tuple[float, ...]:
        """Return learning rate and loss scalars of this rollout's update."""
        return tuple(map(self.at_rollout_start, self._schedules))

    def check_consistency(self, steps: int, rollout: RolloutBuffer) -> None:
        """Raise ValueError if the counts are impossible after `steps` steps of a run."""
        if self.steps != steps:
            raise ValueError(f"agent.steps: is {self.steps}, the run's are {steps}")
        own = int(rollout.valid[: rollout.position].sum())
        of_all = steps - self._steps_at_rollout_start
        most = own if self.comm.is_single else steps
        if not own <= of_all <= most or (of_all and not rollout.position):
            raise ValueError(
                f"agent.steps_at_rollout_start: is {self._steps_at_rollout_start} at step "
                f"{steps}, but the rollout holds {own} valid steps"
            )


class Due(Enum):
    """What is due at a step."""

    GRADIENT_STEP = auto()
    TARGET_UPDATE = auto()


class UpdateClock(Stateful):
    """Count environment steps, and the updates done of those that are due.

    After `learning_starts` steps, `updates_per_train` gradient steps are due at every multiple
    of `train_every`, and then a target update at every multiple of `target_every`.
    """

    state_names: ClassVar[tuple[str, ...]] = (
        "steps",
        "_last_trained_step",
        "_updates_done",
        "_learning_start",
        "target_updates",
    )
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(state_names, COUNT)

    def __init__(
        self,
        *,
        learning_starts: int,
        train_every: int,
        updates_per_train: int,
        target_every: int,
        total_steps: int,
    ) -> None:
        self._learning_starts, self._total_steps = learning_starts, total_steps
        self._train_every, self._updates_per_train = train_every, updates_per_train
        self._target_every = target_every
        self.steps = 0  # valid environment steps observed
        self._learning_start = learning_starts  # step; later after `restart_learning`
        self._last_trained_step = 0  # all updates due up to this step are done
        self._updates_done = 0  # gradient steps done of those due at the next step
        self.target_updates = 0

    @property
    def has_pending_updates(self) -> bool:
        """Whether an interruption left updates undone."""
        return self._last_trained_step < self.steps

    def due(self, can_sample: Callable[[], bool]) -> Iterator[Due]:
        """Yield what became due since the last call, in order; nothing without samples.

        An update counts as done when the next one is requested: after an interruption, the next
        call yields the interrupted update again.
        """
        for step in range(self._last_trained_step + 1, self.steps + 1):
            trains, updates_target = step % self._train_every == 0, step % self._target_every == 0
            if step > self._learning_start and (trains or updates_target) and can_sample():
                while trains and self._updates_done < self._updates_per_train:
                    yield Due.GRADIENT_STEP
                    self._updates_done += 1
                self._updates_done = 0
                if updates_target:
                    yield Due.TARGET_UPDATE
                    self.target_updates += 1
            else:
                self._updates_done = 0  # what an interruption left has no samples any more
            self._last_trained_step = step

    def first_update(self, steps_without_samples: int = 0) -> int:
        """Return the step of the first gradient steps."""
        every, begin = self._train_every, self._learning_start - self._learning_starts
        return max(self._learning_start, begin + steps_without_samples) // every * every + every

    @property
    def first_update_reason(self) -> str:
        """The settings that `first_update` follows from."""
        reason = f"agent.learning_starts={self._learning_starts:,}"
        if self._train_every > 1:
            reason += f", train_every={self._train_every:,}"
        restarted = self._learning_start > self._learning_starts
        return f"the replay starts empty: {reason}" if restarted else reason

    @property
    def steps_until_update(self) -> int:
        """Environment steps until gradient steps are due, if all earlier ones are done."""
        every = self._train_every
        return max(self.steps, self._learning_start) // every * every + every - self.steps

    def rate(self, schedule: Schedule) -> float:
        """Return the learning rate of an update, which never reaches 0.

        An update at the very last step uses the rate of the interval before it.
        """
        now = min(self.steps, max(0, self._total_steps - self._train_every))
        return schedule.at(now, ahead=self.steps - now)

    def rate_and_beta(self, rate: Schedule, beta: Schedule) -> tuple[float, float]:
        """Return the learning rate and the exponent of importance weights of an update."""
        return self.rate(rate), beta.at(self.steps)

    def restart_learning(self) -> None:
        """Begin to learn again after `learning_starts` more steps."""
        self._learning_start = self.steps + self._learning_starts

    def check_consistency(self, steps: int, most_per_timestep: int) -> None:
        """Raise ValueError if the counts are impossible after `steps` steps of a run."""
        trained, starts = self._last_trained_step, self._learning_starts
        if self.steps != steps:
            raise ValueError(f"agent.steps: is {self.steps}, the run's are {steps}")
        if not starts <= self._learning_start <= steps + starts:
            most = f"{starts} to {steps + starts}"
            raise ValueError(f"agent.learning_start: is {self._learning_start}, must be {most}")
        # Updates can be pending for the last timestep, or since the last multiple of train_every.
        left = steps - max(trained, min(steps, self._learning_start))
        if trained > steps or left > self._train_every + 2 * most_per_timestep:
            raise ValueError(
                f"agent.last_trained_step: {trained} is impossible after {steps} steps"
            )
        due = trained < steps and (trained + 1) % self._train_every == 0
        if not 0 <= self._updates_done <= (self._updates_per_train if due else 0):
            raise ValueError(
                f"agent.updates_done: {self._updates_done} are not due at step {trained + 1}"
            )
