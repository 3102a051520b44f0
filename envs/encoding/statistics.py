"""Episode returns and lengths, and numbers from `info` at episode ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful
from steadyrl.envs.encoding.tensors import on_host
from steadyrl.envs.types import Episode

if TYPE_CHECKING:
    from steadyrl.envs.encoding.step_buffer import StepBuffer


def read_info(
    info: Mapping[str, Any],
    names: Sequence[str],
    out: NDArray[np.float32],
    warn: Callable[[str], None],
) -> None:
    """Write the named values [M] of one environment's info; NaN: not a number."""
    for index, name in enumerate(names):
        found = _number(value := info.get(name))
        out[index] = math.nan if found is None else found
        _warn_unusable(info, name, value, found, warn)


def read_infos(
    infos: Mapping[str, Any],
    names: Sequence[str],
    out: NDArray[np.float32],
    warn: Callable[[str], None],
) -> None:
    """Write the named values [N, M] of a batched info, which has arrays [N] and masks `_name`."""
    for index, name in enumerate(names):
        present, values = on_host((infos.get(f"_{name}", True), infos.get(name)))
        found = _numbers(values, len(out))
        out[:, index] = math.nan if found is None else np.where(present, found, math.nan)
        _warn_unusable(infos, name, values, found, warn)


def _numbers(values: Any, count: int) -> NDArray[np.float32] | None:
    """Return `count` numbers, or one for all; None for what is none, or of another shape."""
    try:
        found = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        return None
    if found.size == count:  # [N], or [N, 1] as simulators return it
        return found.reshape(count)
    return None if found.ndim else found


def _number(value: Any) -> float | None:
    try:
        return float(value.item() if np.shape(value) == (1,) else value)
    except Exception:  # overflow, or an exception of user code: must not fail the episode
        return None


def _warn_unusable(
    info: Mapping[str, Any], name: str, value: Any, found: Any, warn: Callable[[str], None]
) -> None:
    """Warn of a value that is missing, or is something else than a number (None: not reported)."""
    if name not in info:
        known = ", ".join(sorted(str(key) for key in info if str(key)[:1] != "_")) or "nothing"
        warn(f"its info has no {name} at an episode's end: it has {known}")
    elif found is None and value is not None:
        warn(f"{name} in its info is not logged: it is a {type(value).__name__}, not a number")


class EpisodeStatistics(Stateful):
    """Return and length of each environment's running episode, over valid steps only."""

    state_names = ("_return", "timesteps", "_begin", "_closed")
    state_limits: ClassVar[Mapping[str, Limits]] = {"timesteps": COUNT, "_begin": COUNT}

    def __init__(self, num_envs: int, info_metrics: Sequence[str]) -> None:
        self._names = info_metrics
        self._return = np.zeros(num_envs)
        self.timesteps = 0  # timesteps recorded
        self._begin = np.zeros(num_envs, np.int64)  # of them, before each episode's first step
        self._closed = 0.0  # sum of the returns of all episodes that are over

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if (self._begin > self.timesteps).any():
            raise ValueError(f"begin: an episode begins after all {self.timesteps} timesteps")

    @property
    def running(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Running returns [N], and timesteps before each episode [N]; sharing memory."""
        return self._return, self._begin

    @property
    def total_reward(self) -> float:
        """The sum of all rewards so far."""
        return self._closed + sum(self._return.tolist())

    def close_episodes(self, returns: Sequence[float]) -> None:
        """Add the returns of episodes that compiled code has closed, in the order of their ends."""
        for each in returns:  # one by one: the order of additions decides the last bit
            self._closed += each

    def drop(self, envs: Sequence[int]) -> None:
        """Close the running episodes of environments that cannot continue them."""
        self.close_episodes(self._return[envs].tolist())
        self._return[envs] = 0.0

    def clear(self) -> None:
        """Reset all running episodes."""
        self.drop(range(len(self._return)))
        self._begin[:] = self.timesteps

    def record(self, out: StepBuffer) -> tuple[Episode, ...]:
        """Record one timestep and return the episodes that ended with it.

        An invalid step starts an episode; an episode ended by a forced reset is not reported.
        """
        self.timesteps += 1
        if out.score_boundaries is not None:
            self._return += out.score_boundaries.reward
            self._begin += out.score_boundaries.skipped
            return self._close(out.score_boundaries.begun, out.score_boundaries.ended, out)
        self._return += out.reward
        if out.is_plain_step():
            return ()
        return self._close(~out.valid, out.terminated | out.truncated, out)

    def _close(
        self, begun: NDArray[np.bool_], ended: NDArray[np.bool_], out: StepBuffer
    ) -> tuple[Episode, ...]:
        self._restart(begun)
        finished = tuple(
            Episode(
                env,
                float(self._return[env]),
                int(self.timesteps - self._begin[env]),
                {k: v for k, v in self._reported(out, env) if math.isfinite(v)},
            )
            for env in np.flatnonzero(ended).tolist()
        )
        self._restart(ended)
        return finished

    def _reported(self, out: StepBuffer, env: int) -> Iterator[tuple[str, float]]:
        return zip(self._names, out.info[env].tolist(), strict=True)

    def _restart(self, where: NDArray[np.bool_]) -> None:
        self.drop(np.flatnonzero(where).tolist())
        self._begin[where] = self.timesteps
