"""Common parts of MinAtar's game kernels: construction, sticky actions, drawing."""

from __future__ import annotations

import importlib
from typing import Any

from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.mt19937 import WORDS, rand, seed_twister
from steadyrl.envs.kernels.pcg64 import episode_seed
from steadyrl.envs.kernels.state import EPISODE, Outcome, Simulation, reset_episode

NOTHING, LEFT, UP, RIGHT, DOWN, FIRE = range(6)
# Constants: sticky probability, difficulty ramping, action set.
STICKY, RAMPING, FIRST_ACTION = range(3)
LAST = 0  # int_state[0] of every game: the last action
SIZE, LIT = 10, 255  # sides of the board; pixel value of an occupied cell
ACTION, SIDE, YES_NO = (0, FIRE), (0, SIZE - 1), (0, 1)  # ranges of state numbers
GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")


def minatar(
    game: str,
    use_minimal_action_set: bool = False,
    sticky_action_prob: float = 0.1,
    difficulty_ramping: bool = True,
) -> Kernel:
    """Return the kernel of a MinAtar game."""
    if game not in GAMES:
        raise ValueError(f"no kernel plays {game}")
    module: Any = importlib.import_module(f"steadyrl.envs.kernels.minatar.{game}")
    actions = module.ACTIONS if use_minimal_action_set else range(6)
    return Kernel(
        module.step,
        (module.CHANNELS, SIZE, SIZE),
        spaces.Discrete(len(actions)),
        int_state=module.RANGES,
        constants=(sticky_action_prob, difficulty_ramping, *actions),
        images=True,
        generator_words=WORDS,
        validate=getattr(module, "validate", None),
    )


@jit
def begin_game(sim: Simulation, outcome: Outcome, env: int) -> None:
    """Begin the next game of an environment: seed its generator, mark the step as a reset."""
    reset_episode(sim.clock, outcome, env)
    if len(sim.seed):
        seed = episode_seed(sim.seed, env, sim.clock[env, EPISODE])
        seed_twister(sim.generators[env], seed)
    sim.int_state[env, LAST] = NOTHING


@jit
def clear(numbers: NDArray[Any]) -> None:
    """Set all numbers [M] to zero."""
    for i in range(len(numbers)):
        numbers[i] = 0


@jit
def played(
    int_state: NDArray[Any], twister: NDArray[Any], constants: NDArray[Any], env: int, chosen: int
) -> int:
    """Return the executed action: the chosen one, or the last one if it sticks."""
    action = int(constants[FIRST_ACTION + chosen])
    if rand(twister) < constants[STICKY]:
        action = int_state[env, LAST]
    int_state[env, LAST] = action
    return action
