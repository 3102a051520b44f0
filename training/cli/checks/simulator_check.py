"""Checks of a vector environment without single ones: its episodes, its seed, its saved state.

Each takes the settings and yields (level, text), as those of `env_check.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.envs.backends.batch import make_batch
from steadyrl.envs.encoding.first_reset import same
from steadyrl.envs.encoding.spaces import observation_encoder
from steadyrl.envs.factory import build_env, build_watched_env
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import Episode, Step
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.cli.checks.env_check import (
    COMPARED,
    SEED,
    STEPS,
    random_actions,
    summary,
    timed_steps,
)
from steadyrl.training.cli.checks.isolated import FAULT, NOTE, OK

COMPARED_FIELDS = ("obs", "reward", "terminated", "truncated", "valid")


def episodes(settings: EnvSettings) -> Iterator[tuple[str, str]]:
    """Play random actions: observations are inside of their space, episodes end."""
    with closing(make_batch(settings)) as simulator:
        space, each = simulator.observation_space, simulator.single_observation_space
    is_vector = observation_encoder(each, settings.images).limits is None
    outside: list[bool] = []

    def look(observations: Any, *_: Any) -> None:
        outside.append(not space.contains(observations))

    env, _ = build_watched_env(settings, look, seed=SEED, num_envs=settings.num_envs)
    ended: list[Episode] = []
    with closing(env):
        for step in _play(env, STEPS):
            ended += step.episodes
    if any(outside):
        batches = f"{sum(outside)} of {len(outside)} batches of observations"
        taking = " (training takes them)" if is_vector else ""
        level = NOTE if is_vector else FAULT
        yield level, f"{batches} are outside of the observation space {space}{taking}"
    if not ended:
        yield NOTE, f"no episode ended within {len(outside) - 1:,} random steps of each environment"
        return
    yield OK, summary([each.length for each in ended], [each.return_ for each in ended])


def determinism(settings: EnvSettings) -> Iterator[tuple[str, str]]:
    """Compare copies with the same seed and actions."""
    with closing(build_env(settings, seed=SEED)) as env:
        first = _recorded(env, COMPARED)
    with closing(build_env(settings, seed=SEED)) as env:
        wrong = _difference(first, _recorded(env, COMPARED))
    if wrong:
        yield FAULT, f"{wrong} with the same seed and actions: runs cannot be repeated"
    else:
        yield OK, "the same seed and actions give the same episodes"


def resume(settings: EnvSettings) -> Iterator[tuple[str, str]]:
    """Save the state between two steps; compare what a copy that loads it does next."""
    with closing(build_env(settings, seed=SEED)) as env:
        _recorded(env, COMPARED // 2)
        state = copy.deepcopy(env.state_dict())
        first = _recorded(env, COMPARED)
    if state["backend"]["simulator"] is None:  # the log says why, and what follows from it
        return
    with closing(build_env(settings, seed=SEED)) as env:
        env.reset()
        env.load_state_dict(state)
        wrong = _difference(first, _recorded(env, COMPARED))
    if wrong:
        yield FAULT, f"{wrong} after its state was saved and restored: resumed runs differ"
    else:
        yield OK, "its state can be saved and restored: resumed runs continue exactly"


def _play(env: VectorEnv, steps: int) -> Iterator[Step]:
    """Yield the steps of random actions, for some seconds at most."""
    generator = np.random.default_rng(SEED)
    if not env.started:
        env.reset()
    for _ in timed_steps(steps):
        yield env.step(random_actions(generator, env.observation, env.spec))


def _recorded(env: VectorEnv, steps: int) -> list[tuple[NDArray[Any], ...]]:
    """Return what random actions give."""
    return [
        tuple(getattr(step, name).copy() for name in COMPARED_FIELDS) for step in _play(env, steps)
    ]


def _difference(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> str:
    """Return where two recordings differ first, as far as both go; "" if nowhere."""
    for at, steps in enumerate(zip(one, other, strict=False)):
        for name, *both in zip(COMPARED_FIELDS, *steps, strict=True):
            if not same(*both):
                return f"its {name} differs at step {at + 1}"
    return ""
