"""What every kernel is made of: the arrays of N environments, and where episodes begin and end.

A kernel is one compiled function, `step(sim, action, outcome)`, that advances all N environments by
one step. It is called from Python and from other compiled functions alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.jit import compiled
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.pcg64 import episode_seed, seed_generator

NEEDS_RESET, LIMIT, ELAPSED, EPISODE = range(4)  # the columns of the clock; a limit of 0 is none


class Simulation(NamedTuple):
    """The whole state of N environments."""

    float_state: NDArray[Any]  # [N, R] float64
    int_state: NDArray[Any]  # [N, W] int64
    constants: NDArray[Any]  # [C] float64, the same for all
    clock: NDArray[Any]  # [N, 4] int64: is the episode over, step limit, steps, number of episode
    generators: NDArray[Any]  # [N, G] uint64
    seed: NDArray[Any]  # [S] uint64: the run's seed in words of 32 bits, or none


class Outcome(NamedTuple):
    """One row of the timeline, which a kernel fills."""

    obs: NDArray[Any]  # [N, *frame] float32, or uint8 where frames are images
    reward: NDArray[Any]  # [N] float32
    terminated: NDArray[Any]  # [N] bool
    truncated: NDArray[Any]  # [N] bool
    valid: NDArray[Any]  # [N] bool


def new_simulation(kernel: Kernel, num_envs: int, limit: int, seed: int | None) -> Simulation:
    """Return the arrays of N environments, whose next row begins their first episodes.

    Without a seed their generators go on from one episode to the next.
    """
    clock = np.zeros((num_envs, 4), np.int64)
    clock[:] = (True, limit, 0, -1)
    return Simulation(
        float_state=np.zeros((num_envs, len(kernel.float_ranges))),
        int_state=np.zeros((num_envs, len(kernel.int_ranges)), np.int64),
        constants=np.array(kernel.constants, np.float64),
        clock=clock,
        generators=np.zeros((num_envs, kernel.generator_words), np.uint64),
        seed=seed_words(seed),
    )


def seed_words(seed: int | None) -> NDArray[np.uint64]:
    """Return a seed in words of 32 bits, the lowest first, as `np.random.SeedSequence` does."""
    if seed is None:
        return np.zeros(0, np.uint64)
    if seed < 0:  # out of a file: its bits have no end
        raise ValueError(f"a seed is 0 or more, not {seed}")
    words = [seed & 0xFFFFFFFF]
    while seed := seed >> 32:
        words.append(seed & 0xFFFFFFFF)
    return np.array(words, np.uint64)


@compiled
def begin_episode(sim: Simulation, outcome: Outcome, env: int) -> None:
    """Begin the next episode of an environment, whose generator is seeded for it."""
    reset_episode(sim.clock, outcome, env)
    if len(sim.seed):
        seed_generator(sim.generators[env], episode_seed(sim.seed, env, sim.clock[env, EPISODE]))


@compiled
def reset_episode(clock: NDArray[Any], outcome: Outcome, env: int) -> None:
    """Begin the next episode of an environment, whose row is then a reset."""
    clock[env, NEEDS_RESET] = False
    clock[env, ELAPSED] = 0
    clock[env, EPISODE] += 1
    outcome.reward[env] = 0.0
    outcome.terminated[env] = False
    outcome.truncated[env] = False
    outcome.valid[env] = False


@compiled
def record_step(
    sim: Simulation, outcome: Outcome, env: int, reward: float, terminated: bool
) -> None:
    """Write what a step came to, and count it against the limit of steps."""
    clock = sim.clock
    clock[env, ELAPSED] += 1
    truncated = clock[env, LIMIT] > 0 and clock[env, ELAPSED] >= clock[env, LIMIT]
    outcome.reward[env] = reward
    outcome.terminated[env] = terminated
    outcome.truncated[env] = truncated
    outcome.valid[env] = True
    clock[env, NEEDS_RESET] = terminated or truncated


@compiled
def valid_actions(action: NDArray[Any], choices: int) -> bool:
    """Tell whether all actions [N] are one of 0…choices-1: a kernel looks its state up by them."""
    for choice in action:  # noqa: SIM110 - a loop is what compiles to one
        if choice < 0 or choice >= choices:
            return False
    return True
