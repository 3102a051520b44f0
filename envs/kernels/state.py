"""State arrays of kernels, and the functions that begin episodes and record steps.

A kernel is one compiled function, `step(sim, action, outcome)`, that advances all N environments by
one step. It is called from Python and from other compiled functions alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.pcg64 import episode_seed, seed_generator

NEEDS_RESET, LIMIT, ELAPSED, EPISODE = range(4)  # columns of `Simulation.clock`; LIMIT 0: none


class Simulation(NamedTuple):
    """The complete state of N environments."""

    float_state: NDArray[Any]  # [N, R] float64
    int_state: NDArray[Any]  # [N, W] int64
    constants: NDArray[Any]  # [C] float64, shared by all environments
    clock: NDArray[Any]  # [N, 4] int64: needs reset, step limit, elapsed steps, episode number
    generators: NDArray[Any]  # [N, G] uint64
    seed: NDArray[Any]  # [S] uint64: the run's seed in 32-bit words; empty: none


class Outcome(NamedTuple):
    """The outcome of one timestep, written by a kernel."""

    obs: NDArray[Any]  # [N, *frame] float32, or uint8 where frames are images
    reward: NDArray[Any]  # [N] float32
    terminated: NDArray[Any]  # [N] bool
    truncated: NDArray[Any]  # [N] bool
    valid: NDArray[Any]  # [N] bool


def new_simulation(kernel: Kernel, num_envs: int, limit: int, seed: int | None) -> Simulation:
    """Return the arrays of N environments that begin their first episodes in the next step.

    Without a seed, generators are not reseeded at an episode's start.
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
    """Return a seed in 32-bit words, lowest first, as `np.random.SeedSequence` splits it."""
    if seed is None:
        return np.zeros(0, np.uint64)
    if seed < 0:  # from a file: the loop below would not end
        raise ValueError(f"a seed is 0 or more, not {seed}")
    words = [seed & 0xFFFFFFFF]
    while seed := seed >> 32:
        words.append(seed & 0xFFFFFFFF)
    return np.array(words, np.uint64)


@jit
def begin_episode(sim: Simulation, outcome: Outcome, env: int) -> None:
    """Begin the next episode of an environment: seed its generator, mark the step as a reset."""
    reset_episode(sim.clock, outcome, env)
    if len(sim.seed):
        seed_generator(sim.generators[env], episode_seed(sim.seed, env, sim.clock[env, EPISODE]))


@jit
def reset_episode(clock: NDArray[Any], outcome: Outcome, env: int) -> None:
    """Begin the next episode of an environment without reseeding: mark the step as a reset."""
    clock[env, NEEDS_RESET] = False
    clock[env, ELAPSED] = 0
    clock[env, EPISODE] += 1
    outcome.reward[env] = 0.0
    outcome.terminated[env] = False
    outcome.truncated[env] = False
    outcome.valid[env] = False


@jit
def record_step(
    sim: Simulation, outcome: Outcome, env: int, reward: float, terminated: bool
) -> None:
    """Write a step's reward and end, and truncate the episode at the step limit."""
    clock = sim.clock
    clock[env, ELAPSED] += 1
    truncated = clock[env, LIMIT] > 0 and clock[env, ELAPSED] >= clock[env, LIMIT]
    outcome.reward[env] = reward
    outcome.terminated[env] = terminated
    outcome.truncated[env] = truncated
    outcome.valid[env] = True
    clock[env, NEEDS_RESET] = terminated or truncated


@jit
def valid_actions(action: NDArray[Any], choices: int) -> bool:
    """Return whether all actions [N] are in 0…choices-1: kernels use them as indices, unchecked."""
    for choice in action:  # noqa: SIM110 - a loop is what compiles to one
        if choice < 0 or choice >= choices:
            return False
    return True
