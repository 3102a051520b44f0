"""Fused rollouts of DQN: step, store and act in compiled code until an update is due."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedyActor
from steadyrl.agents.base import Actor
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.engine.cpu.policy import epsilon_greedy_actions
from steadyrl.agents.learner.schedules import UpdateClock, cosine, linear
from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.buffers.replay.fused_append import ERROR, append_timestep
from steadyrl.buffers.replay.host import HostReplay
from steadyrl.core.jit import box, call, jit
from steadyrl.envs.types import NON_FINITE, OBS_SLOT, STEP_SLOT, STOP, BlockResult, StepMany

STEPS, DRAWN = range(2)  # indices of `cursors`
CONSTANT, LINEAR, COSINE = range(3)
CURVES = {"constant": CONSTANT, "linear": LINEAR, "cosine": COSINE}
linear_jit, cosine_jit = jit(linear), jit(cosine)


class RolloutArrays(NamedTuple):
    """Inputs of ε-greedy steps in compiled code: network, random numbers, schedule of ε."""

    layer_table: NDArray[np.int64]
    activation: int
    uniforms: NDArray[np.float64]  # [R, N]
    random_actions: NDArray[np.int64]  # [R, N]
    curve: int
    epsilons: NDArray[np.float64]  # [5] start, end, steps, warm-up and delay of the schedule
    clip_reward: bool
    cursors: NDArray[np.int64]  # [2] steps so far, next row of `uniforms`


@jit
def run_steps(advance: int, boxed_context: Any, boxed: Any) -> None:
    """Step environments until the random numbers are used up or the block ends."""
    context = boxed_context.value
    arrays, ring = boxed.value
    counters, cursors = context.counters, arrays.cursors
    while True:
        call(advance, (context,))
        if counters[NON_FINITE]:
            return
        outcome = context.outcomes[counters[STEP_SLOT]]
        obs = context.observations[counters[OBS_SLOT]]
        append_timestep(ring, outcome, context.flat_action, obs, arrays.clip_reward)
        for valid in outcome.valid:
            cursors[STEPS] += valid
        drawn = cursors[DRAWN]
        if ring.counters[ERROR] or counters[STOP] or drawn == len(arrays.uniforms):
            return
        epsilon = epsilon_at(arrays.curve, arrays.epsilons, cursors[STEPS])
        epsilon_greedy_actions(
            arrays.layer_table,
            arrays.activation,
            obs,
            arrays.uniforms[drawn],
            arrays.random_actions[drawn],
            epsilon,
            context.flat_action,
        )
        cursors[DRAWN] = drawn + 1


@jit
def epsilon_at(curve: int, epsilons: Any, now: int) -> float:
    """Compute `Schedule.at` in compiled code."""
    start, end, steps, warmup, delay = epsilons
    epsilon: float = start
    since = now - warmup - delay
    if now < warmup:
        epsilon = start * min(1.0, now / warmup)
    elif since >= 0 and curve == LINEAR:
        epsilon = linear_jit(start, end, steps, since)
    elif since >= 0 and curve == COSINE:
        epsilon = cosine_jit(start, end, steps, since)
    return epsilon


class FusedRollout:
    """Fill a replay in compiled code."""

    def __init__(
        self,
        arrays: RolloutArrays,
        actor: EpsilonGreedyActor,
        replay: HostReplay,
        clock: UpdateClock,
    ) -> None:
        self._arrays, self._actor, self._replay, self._clock = arrays, actor, replay, clock
        self._boxed: Any = None

    def __call__(self, step_many: StepMany, steps: int) -> BlockResult:
        """Continue from the actions that were sent, until an update is due; count the steps."""
        clock = self._clock
        # With nothing to sample, updates are skipped: that is decided at every timestep.
        filled = len(self._replay) and self._replay.never_empties
        steps = min(steps, clock.steps_until_update) if filled else 1
        actor, cursors = self._actor, self._arrays.cursors
        actor.restore_draws(self._replay.num_envs)  # a continued run begins without acting
        if actor.uniforms is not self._arrays.uniforms or self._boxed is None:
            self._arrays = self._arrays._replace(
                uniforms=actor.uniforms, random_actions=actor.random_actions
            )
            self._boxed = box((self._arrays, self._replay.ring))
        cursors[:] = clock.steps, actor.next or len(actor.uniforms)
        self._replay.begin_append()
        block = step_many(run_steps, steps, self._boxed)
        self._replay.end_append()
        actor.next = int(cursors[DRAWN]) % len(actor.uniforms)
        clock.steps += block.steps
        return block


def build_fused_rollout(
    settings: DQNSettings,
    actor: Actor,
    replay: ReplayBuffer,
    clock: UpdateClock,
    total_steps: int,
) -> FusedRollout | None:
    """Return the fused rollout, or None where it is not supported."""
    if not isinstance(actor, EpsilonGreedyActor) or not isinstance(replay, HostReplay):
        return None
    network, epsilons = actor.on_host, settings.epsilons(total_steps)
    if network is None or actor.reads_host_weights:  # its copy of the weights may be stale by then
        return None
    arrays = RolloutArrays(
        network.layer_table,
        network.activation,
        actor.uniforms,
        actor.random_actions,
        CURVES[epsilons.shape],
        np.array([epsilons.start, epsilons.end, epsilons.steps, epsilons.warmup, epsilons.delay]),
        settings.clip_reward,
        np.zeros(2, np.int64),
    )
    return FusedRollout(arrays, actor, replay, clock)
