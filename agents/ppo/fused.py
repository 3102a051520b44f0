"""Fused rollouts of PPO: step, store and sample in compiled code until the block ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.agents.actors.sampling import SamplingActor
from steadyrl.agents.base import Decision
from steadyrl.agents.engine.cpu.policy import PolicyArrays, sample_actions
from steadyrl.agents.learner.reward_normaliser import RewardNormaliser
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.buffers.memory_layout import IS_TERMINATED, IS_TRUNCATED, IS_VALID
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.core.jit import box, call, jit
from steadyrl.envs.types import NON_FINITE, OBS_SLOT, STEP_SLOT, STOP, BlockResult, StepMany

POSITION, NOISE = range(2)  # indices of `cursors`


class RolloutArrays(NamedTuple):
    """A rollout being filled, and the inputs of sampling its actions."""

    policy_arrays: PolicyArrays
    noise: NDArray[Any]  # [T, N, K]
    raw_action: NDArray[Any]  # [N, A] actions in progress, before rescaling
    obs: NDArray[Any]  # [T, N, D]
    action: NDArray[Any]  # [T, N, A]
    reward: NDArray[Any]  # [T, N]
    flags: NDArray[Any]  # [3, T, N] terminated, truncated, valid
    next_obs: NDArray[Any]  # [N, D]
    clip_reward: bool
    cursors: NDArray[Any]  # [2] next row of the rollout, next row of the noise


@jit
def run_steps(advance: int, boxed_context: Any, boxed: Any) -> None:
    """Step environments until the rollout is full, the noise is used up or the block ends."""
    context, arrays = boxed_context.value, boxed.value
    counters, cursors = context.counters, arrays.cursors
    while True:
        t = cursors[POSITION]
        _copy(context.observations[counters[OBS_SLOT]], arrays.obs[t])
        call(advance, (context,))
        if counters[NON_FINITE]:
            return
        _copy(arrays.raw_action, arrays.action[t])
        outcome = context.outcomes[counters[STEP_SLOT]]
        for env in range(len(outcome.reward)):
            reward = outcome.reward[env]
            arrays.reward[t, env] = min(max(reward, -1), 1) if arrays.clip_reward else reward
            arrays.flags[IS_TERMINATED, t, env] = outcome.terminated[env]
            arrays.flags[IS_TRUNCATED, t, env] = outcome.truncated[env]
            arrays.flags[IS_VALID, t, env] = outcome.valid[env]
        obs = context.observations[counters[OBS_SLOT]]
        cursors[POSITION] = t + 1
        if counters[STOP] or t + 1 == len(arrays.reward) or cursors[NOISE] == len(arrays.noise):
            _copy(obs, arrays.next_obs)
            return
        sample_actions(
            arrays.policy_arrays,
            obs,
            arrays.noise[cursors[NOISE]],
            arrays.raw_action,
            context.flat_action,
        )
        cursors[NOISE] += 1


@jit
def _copy(source: Any, target: Any) -> None:
    for n in range(source.shape[0]):
        for i in range(source.shape[1]):
            target[n, i] = source[n, i]


class FusedRollout:
    """Fill a rollout in compiled code."""

    def __init__(
        self,
        arrays: RolloutArrays,
        actor: SamplingActor,
        rollout: RolloutBuffer,
        rewards: RewardNormaliser | None,
    ) -> None:
        self._arrays, self._actor, self._rollout, self._rewards = arrays, actor, rollout, rewards
        self._boxed: Any = None

    def __call__(self, decision: Decision, step_many: StepMany, steps: int) -> BlockResult:
        """Continue from the actions that were sent."""
        if self._boxed is None:
            self._boxed = box(self._arrays)
        arrays, rollout, rows = self._arrays, self._rollout, len(self._actor.noise)
        assert decision.raw_action is not None
        arrays.raw_action[...] = decision.raw_action.numpy().reshape(arrays.raw_action.shape)
        begin = rollout.position
        arrays.cursors[:] = begin, self._actor.next or rows
        block = step_many(run_steps, steps, self._boxed)
        rollout.position, used = arrays.cursors.tolist()
        rollout.evaluated = False
        self._actor.next = used % rows
        if self._rewards is not None:
            self._rewards.add(*rollout.rewards_since(begin))
        return block


def build_fused_rollout(
    settings: PPOSettings,
    actor: SamplingActor,
    rollout: RolloutBuffer,
    rewards: RewardNormaliser,
    next_obs: NDArray[Any],
) -> FusedRollout | None:
    """Return the fused rollout, or None where it is not supported."""
    if actor.policy_arrays is None or actor.reads_host_weights:  # its rollout is on a device
        return None
    steps, envs = rollout.reward.shape
    parts = (actor.noise, rollout.obs, rollout.action)
    noise, obs, action = (part.numpy().reshape(steps, envs, -1) for part in parts)
    arrays = RolloutArrays(
        actor.policy_arrays,
        noise,
        np.zeros_like(action[0]),
        obs,
        action,
        rollout.reward.numpy(),
        rollout.flags.numpy(),
        next_obs.reshape(envs, -1),
        settings.clip_reward,
        np.zeros(2, np.int64),
    )
    return FusedRollout(arrays, actor, rollout, rewards if settings.normalizes_reward else None)
