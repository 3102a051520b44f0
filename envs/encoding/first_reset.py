"""What the first reset of an environment shows: its `info`, and whether it heeds its seed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

SEED = 1  # not 0: `if seed:` is common, and episodes have other seeds
QUICK_SECONDS = 0.1  # of a reset that is repeated to compare it


def first_info(env: gym.Env[Any, Any], remark: Callable[[str], None] | None) -> Mapping[str, Any]:
    """Reset an environment and return its `info`; `remark` gets a line if the seed does nothing."""
    try:
        begin = time.perf_counter()
        observation, info = env.reset(seed=SEED)
        quick = time.perf_counter() - begin < QUICK_SECONDS
    except (Exception, SystemExit):  # reported by the first reset of training
        return {}
    if remark is not None and quick:
        _compare_seed(env, observation, remark)
    return info if isinstance(info, Mapping) else {}


def _compare_seed(env: gym.Env[Any, Any], observation: Any, remark: Callable[[str], None]) -> None:
    """Remark on an environment whose second reset with a seed differs from the first."""
    try:
        first = copy.deepcopy(observation)
        again, _ = env.reset(seed=SEED)
        repeats = same(first, again)
    except (Exception, SystemExit):  # refuses to reset within an episode, or is not comparable
        return
    if not repeats:
        remark(
            f"reset(seed={SEED}) gives another observation the second time: runs cannot be "
            "repeated, nor resumed within an episode. Draw from self.np_random, after "
            "super().reset(seed=seed)"
        )


def same(one: Any, other: Any) -> bool:
    """Return whether two results are equal, whatever their nesting."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    first, second = np.asarray(one), np.asarray(other)
    numbers = first.dtype.kind in "fc" and second.dtype.kind in "fc"
    return bool(np.array_equal(first, second, equal_nan=numbers))  # NaN is a fault of its own
