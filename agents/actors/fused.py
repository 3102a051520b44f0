"""Fused greedy rollouts: compiled acting and stepping, for most of an evaluation."""

from __future__ import annotations

from typing import Any

from steadyrl.agents.engine.cpu.policy import PolicyArrays, greedy_actions
from steadyrl.core.jit import box, call, jit
from steadyrl.envs.types import NON_FINITE, OBS_SLOT, STOP, BlockResult, StepMany


@jit
def run_steps(advance: int, boxed_context: Any, boxed: Any) -> None:
    """Step environments with greedy actions until they stop the block."""
    context, policy_arrays = boxed_context.value, boxed.value
    counters = context.counters
    while True:
        call(advance, (context,))
        if counters[NON_FINITE] or counters[STOP]:
            return
        greedy_actions(policy_arrays, context.observations[counters[OBS_SLOT]], context.flat_action)


class FusedGreedy:
    """Run many timesteps of greedy actions in compiled code."""

    def __init__(self, policy_arrays: PolicyArrays) -> None:
        self._policy_arrays = policy_arrays
        self._boxed: Any = None

    def __call__(self, step_many: StepMany, steps: int) -> BlockResult:
        """Continue from the actions that were sent."""
        if self._boxed is None:
            self._boxed = box(self._policy_arrays)
        return step_many(run_steps, steps, self._boxed)
