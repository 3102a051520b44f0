"""Running statistics of rewards, over valid steps only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.core.jit import jit
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful

SMALLEST_STD = 1e-8

Moments = Sequence[float]  # count, mean and Σ(x − mean)²


def merge_moments(one: Moments, other: Moments) -> Moments:
    """Return the merged moments (Chan et al. 1979)."""
    count, mean, square = one
    more, its_mean, its_square = other
    if not more:
        return one
    delta, total = its_mean - mean, count + more
    square += its_square + delta**2 * count * more / total
    return total, mean + delta * more / total, square


class RewardNormaliser(Stateful):
    """Divide rewards by the standard deviation of their discounted sums; never shift them.

    The sums are reset at the end of an episode if `episodic`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("_return", "_count", "_mean", "_square")
    state_limits: ClassVar[Mapping[str, Limits]] = {
        "_count": COUNT,
        "_mean": Limits(-1e50, 1e50),
        "_square": Limits(0, 1e100),
    }

    def __init__(self, num_envs: int, gamma: float, *, episodic: bool = True) -> None:
        self.comm: Comm = SINGLE_PROCESS  # statistics are of all ranks
        self._gamma, self._episodic = gamma, episodic
        self._return: NDArray[np.float64] = np.zeros(num_envs)
        self._count = 0.0
        self._mean = 0.0
        self._square = 0.0

    def add(self, reward: NDArray[np.float32], valid: NDArray[np.bool_]) -> None:
        """Count the rewards of a timestep [N], or of several [R, N] in order."""
        timesteps = (part.reshape(-1, len(self._return)) for part in (reward, valid))
        self._count, self._mean, self._square = update_discounted_returns(
            *timesteps,
            *(self._gamma, self._episodic, self._return),
            *(self._count, self._mean, self._square),
        )

    def decay(self, factor: float) -> None:
        """Scale the weight of everything counted so far."""
        self._count *= factor
        self._square *= factor

    def merge_state(self, state: Mapping[str, Any]) -> None:
        """Merge the state of another rank's normaliser."""
        theirs = [state[name] for name in ("count", "mean", "square")]
        mine = [self._count, self._mean, self._square]
        self._count, self._mean, self._square = merge_moments(mine, theirs)

    @property
    def scale(self) -> float:
        """Factor for rewards, from all ranks; 1 until they vary."""
        parts = self.comm.all_gather([self._count, self._mean, self._square])
        count, _, square = reduce(merge_moments, parts)
        std = math.sqrt(square / count) if count else 0.0
        return 1 / std if std > SMALLEST_STD else 1.0


@jit
def update_discounted_returns(  # type: ignore[no-untyped-def]
    reward, valid, gamma, episodic, returns, count, mean, square
):
    """Update G ← γG + r at valid steps [R, N], 0 where an environment resets if `episodic`.

    Return count, mean and Σ(G − mean)² including them (Chan et al. 1979).
    """
    for t in range(len(reward)):
        new, total = 0, 0.0
        for env in range(len(returns)):
            if valid[t, env]:
                returns[env] = returns[env] * gamma + reward[t, env]
                new += 1
                total += returns[env]
            elif episodic:
                returns[env] = 0.0
        if not new:
            continue
        own, spread = total / new, 0.0
        for env in range(len(returns)):
            if valid[t, env]:
                spread += (returns[env] - own) ** 2
        delta = own - mean
        square += spread + delta**2 * count * new / (count + new)
        mean += delta * new / (count + new)
        count += new
    return count, mean, square
