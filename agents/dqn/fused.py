"""Rows of DQN as machine code: step, store, explore, until learning or something else is due."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedy
from steadyrl.agents.base import Actor
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.engine.cpu.policy import explore
from steadyrl.agents.learner.schedules import cosine, linear
from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.buffers.replay.fused_append import ERROR, append_timestep
from steadyrl.buffers.replay.host import HostReplay
from steadyrl.core.jit import Held, call, compiled
from steadyrl.envs.types import NON_FINITE, OBS_SLOT, STEP_SLOT, STOP, BlockResult, StepMany

STEPS, DRAWN = range(2)  # of the places
CONSTANT, LINEAR, COSINE = range(3)
CURVES = {"constant": CONSTANT, "linear": LINEAR, "cosine": COSINE}
linearly, as_cosine = compiled(linear), compiled(cosine)


class Exploring(NamedTuple):
    """What ε-greedy actions are taken by."""

    plan: NDArray[np.int64]
    activation: int
    coins: NDArray[np.float64]  # [R, N]
    choices: NDArray[np.int64]  # [R, N]
    curve: int
    epsilons: NDArray[np.float64]  # [5] of the schedule: start, end, steps, warm-up, delay
    clip_reward: bool
    places: NDArray[np.int64]  # [2] steps until now, the next row of what was drawn


@compiled
def go_on(advance: int, boxed_context: Any, held: Any) -> None:
    """Make rows until what was drawn is used up, or the environments say so."""
    context = boxed_context.inside
    by, ring = held.inside
    counters, places = context.counters, by.places
    while True:
        call(advance, (context,))
        if counters[NON_FINITE]:
            return
        row, obs = context.outcomes[counters[STEP_SLOT]], context.observations[counters[OBS_SLOT]]
        append_timestep(ring, row, context.flat_action, obs, by.clip_reward)
        for valid in row.valid:
            places[STEPS] += valid
        drawn = places[DRAWN]
        if ring.counters[ERROR] or counters[STOP] or drawn == len(by.coins):
            return
        epsilon = epsilon_at(by.curve, by.epsilons, places[STEPS])
        explore(
            by.plan,
            by.activation,
            obs,
            by.coins[drawn],
            by.choices[drawn],
            epsilon,
            context.flat_action,
        )
        places[DRAWN] = drawn + 1


@compiled
def epsilon_at(curve: int, epsilons: Any, now: int) -> float:
    """Return what `Schedule.at` does."""
    start, end, steps, warmup, delay = epsilons
    epsilon: float = start
    if now < warmup:
        epsilon = start * min(1.0, now / warmup)
    elif curve == LINEAR:
        epsilon = linearly(start, end, steps, max(0.0, now - warmup - delay))
    elif curve == COSINE:
        epsilon = as_cosine(start, end, steps, max(0.0, now - warmup - delay))
    return epsilon


@compiled
def hold(by: Any, ring: Any) -> Any:
    """Hand over what `go_on` works on."""
    return Held((by, ring))


class Explorer:
    """Fills a replay by machine code."""

    def __init__(self, by: Exploring, actor: EpsilonGreedy, replay: HostReplay) -> None:
        self._by, self._actor, self._replay = by, actor, replay
        self._held: Any = None

    def __call__(self, run: StepMany, now: int, steps: int) -> BlockResult:
        """Go on from the actions that were sent."""
        actor, places = self._actor, self._by.places
        ring = self._replay.ring
        if actor.coins is not self._by.coins or self._held is None:
            self._by = self._by._replace(coins=actor.coins, choices=actor.choices)
            self._held = hold(self._by, ring)
        places[:] = now, actor.next or len(actor.coins)
        self._replay.begin_append(ring)
        rows = run(go_on, steps, self._held)
        self._replay.end_append(ring)
        actor.next = int(places[DRAWN]) % len(actor.coins)
        return rows


def explorer(
    settings: DQNSettings, actor: Actor, replay: ReplayBuffer, total_steps: int
) -> Explorer | None:
    """Return what fills a replay by machine code; None where it cannot be."""
    if not isinstance(actor, EpsilonGreedy) or not isinstance(replay, HostReplay):
        return None
    network, epsilons = actor.on_host, settings.epsilons(total_steps)
    if network is None or actor.mirrored:  # whose copy may be old by then
        return None
    by = Exploring(
        network.plan,
        network.activation,
        actor.coins,
        actor.choices,
        CURVES[epsilons.shape],
        np.array([epsilons.start, epsilons.end, epsilons.steps, epsilons.warmup, epsilons.delay]),
        settings.clip_reward,
        np.zeros(2, np.int64),
    )
    return Explorer(by, actor, replay)
