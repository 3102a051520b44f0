"""Rows of PPO as machine code: step, store, draw the next actions, until something is due."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.agents.actors.sampling import Sampling
from steadyrl.agents.base import Decision
from steadyrl.agents.engine.cpu.policy import Drawing, draw
from steadyrl.agents.networks.normalizers import RewardNormaliser
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.core.jit import Held, call, compiled
from steadyrl.envs.types import NON_FINITE, OBS_SLOT, STEP_SLOT, STOP, BlockResult, StepMany

POSITION, NOISE = range(2)  # of the places


class Collecting(NamedTuple):
    """A rollout being filled, and what its actions are drawn with."""

    drawing: Drawing
    noise: NDArray[Any]  # [T, N, K]
    chosen: NDArray[Any]  # [N, A] the actions that were sent, in the policy's own units
    obs: NDArray[Any]  # [T, N, D]
    action: NDArray[Any]  # [T, N, A]
    reward: NDArray[Any]  # [T, N]
    flags: NDArray[Any]  # [3, T, N] terminated, truncated, valid
    next_obs: NDArray[Any]  # [N, D]
    clip_reward: bool
    places: NDArray[Any]  # [2] the next rows of the rollout and of the noise


@compiled
def collect(advance: int, boxed_context: Any, held: Any) -> None:
    """Make rows until the rollout is full, the noise used up, or the environments say so."""
    context, to = boxed_context.inside, held.inside
    counters, places = context.counters, to.places
    while True:
        t = places[POSITION]
        _copy(context.observations[counters[OBS_SLOT]], to.obs[t])
        call(advance, (context,))
        if counters[NON_FINITE]:
            return
        _copy(to.chosen, to.action[t])
        row = context.outcomes[counters[STEP_SLOT]]
        for env in range(len(row.reward)):
            reward = row.reward[env]
            to.reward[t, env] = min(max(reward, -1), 1) if to.clip_reward else reward
            to.flags[0, t, env] = row.terminated[env]
            to.flags[1, t, env] = row.truncated[env]
            to.flags[2, t, env] = row.valid[env]
        obs = context.observations[counters[OBS_SLOT]]
        places[POSITION] = t + 1
        if counters[STOP] or t + 1 == len(to.reward) or places[NOISE] == len(to.noise):
            _copy(obs, to.next_obs)
            return
        draw(to.drawing, obs, to.noise[places[NOISE]], to.chosen, context.flat_action)
        places[NOISE] += 1


@compiled
def _copy(these: Any, there: Any) -> None:
    for n in range(these.shape[0]):
        for i in range(these.shape[1]):
            there[n, i] = these[n, i]


@compiled
def hold(to: Any) -> Any:
    """Hand over what `collect` works on."""
    return Held(to)


class Collector:
    """Fills a rollout by machine code."""

    def __init__(
        self,
        to: Collecting,
        actor: Sampling,
        rollout: RolloutBuffer,
        rewards: RewardNormaliser | None,
    ) -> None:
        self._to, self._actor, self._rollout, self._rewards = to, actor, rollout, rewards
        self._held: Any = None

    def __call__(self, decision: Decision, run: StepMany, steps: int) -> BlockResult:
        """Go on from the actions that were sent."""
        if self._held is None:
            self._held = hold(self._to)
        to, rollout, many = self._to, self._rollout, len(self._actor.noise)
        assert decision.chosen is not None
        to.chosen[...] = decision.chosen.numpy().reshape(to.chosen.shape)
        begin = rollout.position
        to.places[:] = begin, self._actor.next or many
        rows = run(collect, steps, self._held)
        rollout.position, used = to.places.tolist()
        self._actor.next = used % many
        if self._rewards is not None:
            self._rewards.add(*rollout.rewards_since(begin))
        return rows


def collector(
    settings: PPOSettings,
    actor: Sampling,
    rollout: RolloutBuffer,
    rewards: RewardNormaliser,
    next_obs: NDArray[Any],
) -> Collector | None:
    """Return what fills a rollout by machine code; None where it cannot be."""
    if actor.drawing is None or actor.mirrored:  # its rollout lies on a device
        return None
    steps, envs = rollout.reward.shape
    parts = (actor.noise, rollout.obs, rollout.action)
    noise, obs, action = (part.numpy().reshape(steps, envs, -1) for part in parts)
    to = Collecting(
        actor.drawing,
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
    return Collector(to, actor, rollout, rewards if settings.normalizes_reward else None)
