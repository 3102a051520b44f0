"""The base of agents that learn from rollouts: fill a rollout, learn from it, discard it.

An algorithm adds its loss (`LossSpec`) and what it learns towards (`Targets`): see PPO, and A2C in
`docs/adding-an-algorithm.md`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.base import (
    Actor,
    DecidedStep,
    Decision,
    LatestLearningStart,
    LearningStart,
)
from steadyrl.agents.extension import ExtensibleAgent, Extension
from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.interrupt import Interrupted
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossScalars
from steadyrl.agents.learner.schedules import Schedule
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.core.metrics import Metrics
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful
from steadyrl.envs.types import BlockResult, Step, StepMany

# Ranks all-reduce their step counts every so many timesteps; updates need whole rollouts only.
SYNC_EVERY = 16


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
        self._fixed_at = -1  # steps at which the schedules' values were fixed
        self._fixed: tuple[float, ...] = ()
        self.comm: Comm = SINGLE_PROCESS
        self.steps = self._steps_at_rollout_start = 0

    def attach_comm(self, comm: Comm) -> None:
        """Count the steps of all ranks."""
        self.comm, self._fixed_at = comm, -1

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
        """Return learning rate and loss scalars of this rollout's update; evaluated once."""
        if self._fixed_at != self._steps_at_rollout_start:
            self._fixed_at = self._steps_at_rollout_start
            self._fixed = tuple(map(self.at_rollout_start, self._schedules))
        return self._fixed

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


class Targets(ABC):
    """What an algorithm learns towards, computed once a rollout is full."""

    def begin_update(self, next_obs: Tensor) -> Tensor:
        """Return the observation [N, …] at T in the form in which the rollout stores the others."""
        return next_obs

    @abstractmethod
    def __call__(self, rollout: RolloutBuffer, next_obs: Tensor) -> None:
        """Compute advantages and returns in place; `next_obs` [N, …] is the observation at T."""

    def metrics(self, value: Tensor, return_: Tensor) -> dict[str, Tensor]:
        """Return scalars [] to log, from values and returns [M] of the valid samples."""
        return {}

    def after_update(self, rollout: RolloutBuffer) -> None:  # noqa: B027 (optional)
        """Take from the rollout what is needed before it is cleared."""

    def attach_comm(self, comm: Comm) -> None:  # noqa: B027 (optional)
        """Collective: compute statistics over all ranks."""


class GAE(Targets):
    """Generalised advantage estimates, with the values that the actor stored."""

    def __init__(self, learner: Learner, *, gamma: float, gae_lambda: float) -> None:
        self._learner, self._how = learner, {"gamma": gamma, "gae_lambda": gae_lambda}

    @override
    def __call__(self, rollout: RolloutBuffer, next_obs: Tensor) -> None:
        with torch.inference_mode():
            _, last_value = self._learner.forward(next_obs)
        rollout.compute_advantages(last_value, **self._how)


# A batch, and the weight of its samples in their means; None: 1/B.
Minibatch = tuple[Any, float | Tensor | None]
# The minibatches of all epochs over a rollout; the generator draws the order of samples.
Minibatches = Callable[[RolloutBuffer, torch.Generator], Iterator[Minibatch]]


def shuffled_minibatches(learner: Learner, *, epochs: int, count: int) -> Minibatches:
    """Return the minibatches of valid samples in random order, `count` an epoch."""
    return lambda rollout, order: (
        (batch, None)
        for _ in range(epochs)
        for batch in rollout.minibatches(
            count, order, None if learner.padding is None else learner.padding.scratch
        )
    )


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What an agent of rollouts is made of."""

    clock: RolloutClock
    learner: Learner
    rollout: RolloutBuffer
    targets: Targets
    minibatches: Minibatches
    shuffling: torch.Generator  # draws the order of samples
    actor: Actor  # behaviour
    build_greedy: Callable[[], Actor]
    next_obs: NDArray[Any] | None = None  # that a fused rollout writes
    fused_rollout: Callable[[Decision, StepMany, int], BlockResult] | None = None


class RolloutAgent(ExtensibleAgent):
    """Collect T timesteps of N environments on the training device, then learn from all of them."""

    state_names: ClassVar[tuple[str, ...]] = (
        "_learner", "_actor", "_rollout", "_next_obs", "_shuffling",
    )  # fmt: skip
    per_rank_state: tuple[str, ...] = ("actor", "shuffling", "rollout", "next_obs")

    def __init__(self, parts: RolloutParts, extensions: Sequence[Extension] = ()) -> None:
        self._clock, self._learner, self._rollout = parts.clock, parts.learner, parts.rollout
        self._targets, self._minibatches = parts.targets, parts.minibatches
        self._shuffling = parts.shuffling
        self._actor, self._build_greedy = parts.actor, parts.build_greedy
        self._fused_rollout = parts.fused_rollout
        obs, next_obs = parts.rollout.obs[0], parts.next_obs
        self._next_obs: NDArray[Any] = (
            torch.zeros(obs.shape, dtype=obs.dtype).numpy() if next_obs is None else next_obs
        )
        self._extend(parts, extensions, parts.clock)

    @property
    def learning_rate(self) -> float:
        """The learning rate in the update that ends the current rollout."""
        rate = self._clock.rate_and_scalars()[0]
        for extension in self._extensions:
            rate = extension.learning_rate(rate)
        return rate

    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        """Return the behaviour actor, or a greedy one."""
        if not explore:
            return self._build_greedy()
        if num_envs != len(self._next_obs):
            raise ValueError(f"rollouts have {len(self._next_obs)} environments, not {num_envs}")
        return self._extended_actor(self._actor)

    def observe(self, decision: Decision, step: Step) -> None:
        """Store the timestep and count its valid steps."""
        self._clock.rate_and_scalars()  # evaluated at the rollout's first timestep
        for extension in self._extensions:
            extension.before_storing(decision)
        decision, step = self._to_store(decision, step)
        action = decision.env_action if decision.raw_action is None else decision.raw_action
        self._rollout.store_hidden_state(decision.hidden_state)
        self._rollout.add(
            decision.obs,
            action,
            decision.log_prob,
            decision.value,
            step.reward,
            step.terminated,
            step.truncated,
            step.valid,
        )
        self._clock.steps += self._comm.global_count(step.valid)
        np.copyto(self._next_obs, step.obs)

    def _to_store(self, decision: Decision, step: Step) -> tuple[Decision, Step]:
        """Return both in the form that the rollout stores and `update` learns from."""
        return decision, step

    @override
    def collect_block(
        self, decision: Decision, step_many: StepMany | None, steps: int
    ) -> BlockResult | None:
        if step_many is None or self._fused_rollout is None or not self._allows_blocks():
            return None
        self._clock.rate_and_scalars()
        block = self._fused_rollout(decision, step_many, steps)
        self._clock.steps += block.steps
        return block

    def update(self) -> Metrics | None:
        """Learn once the rollout is full, then clear it.

        It is a transaction: if a stop request interrupts it, everything is restored, and the whole
        update is due again after resuming.
        """
        rollout = self._rollout
        if rollout.position < len(rollout.reward) or self._learner.stop.confirmed:
            return None
        order = self._shuffling.get_state()
        try:
            with self._transaction():
                metrics = self._learn()
        except Interrupted:
            self._shuffling.set_state(order)
            return None
        self._targets.after_update(rollout)
        rollout.clear()
        self._clock.begin_rollout()
        return metrics

    def _learn(self) -> Metrics | None:
        """Compute the targets, and step on the minibatches of all epochs."""
        learner, rollout = self._learner, self._rollout
        rate, scalars = self.learning_rate, self._loss_scalars()
        self._compute_targets()
        samples = len(rollout.valid_indices)
        if not (samples if self._comm.is_single else sum(self._comm.all_gather(samples))):
            return None
        for batch, sample_weight in self._minibatches(rollout, self._shuffling):
            if learner.stop.confirmed:
                raise Interrupted
            learner.sample_weight = sample_weight
            learner.step(batch, rate, *scalars)
            if learner.limit_exceeded:
                break
            for extension in self._extensions:
                rate = extension.after_step(rate)
        metrics = learner.means(self._targets.metrics(*rollout.values_and_returns()))
        for extension in self._extensions:
            metrics = extension.after_epochs(metrics, rate)
        return metrics

    def _compute_targets(self) -> None:
        next_obs = self._targets.begin_update(self._rollout.to_device(self._next_obs))
        self._targets(self._rollout, next_obs)
        for extension in self._extensions:
            extension.after_targets(next_obs)

    def _loss_scalars(self) -> LossScalars:
        """Return what the loss takes besides the batch."""
        scalars: LossScalars = self._clock.rate_and_scalars()[1:]
        for extension in self._extensions:  # the last one's loss is the outermost
            scalars = (*extension.loss_scalars(), *scalars)
        return scalars

    def _transaction(self) -> ExitStack:
        """Return a context that restores weights, statistics and targets on Interrupted."""
        with ExitStack() as transactions:
            for extension in self._extensions:
                transactions.enter_context(extension.transaction())
            overwritten = self._rollout.reward, self._rollout.value
            transactions.enter_context(self._learner.transaction(*overwritten))
            return transactions.pop_all()

    @property
    @override
    def learning_start(self) -> LearningStart:
        timesteps, envs = self._rollout.reward.shape
        envs *= self._comm.size
        reason = f"first rollout: {timesteps:,} timesteps of {envs:,} environment"
        # Timesteps at which environments reset fill the rollout, too, and count no step.
        return LatestLearningStart(timesteps * envs, "rollout", reason + "s" * (envs > 1))

    @property
    @override
    def syncs_this_step(self) -> bool:
        timesteps = self._rollout.position + 1
        return timesteps % SYNC_EVERY == 0 or timesteps == len(self._rollout.reward)

    @override
    def attach_comm(self, comm: Comm) -> None:
        super().attach_comm(comm)
        self._clock.attach_comm(comm)
        self._targets.attach_comm(comm)
        self._fused_rollout = None

    @override
    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        super().reshard(departed_states)
        self._rollout.clear()
        self._clock.begin_rollout()

    @override
    def check_consistency(self, steps: int, pending: DecidedStep | None, obs: NDArray[Any]) -> None:
        rollout = self._rollout
        self._clock.check_consistency(steps, rollout)
        self._actor.check_actions(rollout.action[: rollout.position])
        if pending is not None:
            self._actor.check_decision(pending[0])
        elif steps and not np.array_equal(self._next_obs, obs):
            raise ValueError("agent.next_obs: differs from the environments' observations")

    def scalars(self) -> dict[str, float]:
        """Return the learning rate and the numbers of extensions."""
        return {"train/learning_rate": self.learning_rate, **super().scalars()}

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the rollout with its noise, and of the network."""
        return {"rollout": self._rollout.nbytes + self._actor.nbytes, **super().nbytes()}

    def release(self) -> None:
        """Free the rollout and the network."""
        self._rollout.release()
        super().release()
