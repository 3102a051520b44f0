"""Step buffers: the arrays into which a backend writes one timestep of N environments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.saved_state import Saved
from steadyrl.envs.types import (
    ActionSpec,
    BoxActions,
    EnvSpec,
    MultiBinaryActions,
    MultiDiscreteActions,
)

MOST_EPISODES = 2**62

PER_ENV = ("kernel", "single")  # backends whose snapshots have one state per environment


class ScoreBoundaries(NamedTuple):
    """One step as counted for scores, where that differs from what the learner gets."""

    reward: NDArray[Any]  # [N] 0 where the environment was reset
    begun: NDArray[np.bool_]  # [N] an episode begins after this step
    ended: NDArray[np.bool_]  # [N] an episode ends with this step
    skipped: NDArray[np.bool_]  # [N] the step counts for the return but not for the length


def load_progress(saved: Mapping[str, Any], envs: int) -> NDArray[np.int64]:
    """Return each environment's episode number and whether it has ended [N, 2] from a snapshot.

    A snapshot of a batch backend has no such state: all environments start new episodes.
    """
    progress, state = np.array([[-1, 1]] * envs), Saved(saved, "backend")
    if backend_kind(state) in PER_ENV:
        progress.T[:] = (
            state.wholes("episode", envs, -1, MOST_EPISODES),
            state.booleans("needs_reset", envs),
        )
    new = progress[:, 0] < 0
    if new.any() and not (new.all() and progress[:, 1].all()):
        raise ValueError("backend.episode: is -1 for one environment, others have started")
    return progress


def backend_kind(saved: Saved) -> str:
    """Return the kind of backend that made a snapshot."""
    found: str = saved.raw("backend_kind")
    if found not in (*PER_ENV, "batch"):
        raise ValueError("backend.backend_kind: unknown kind of backend")
    return found


class StepBuffer:
    """One timestep of N environments in one preallocated block of memory.

    The block holds floats, then flags, then uint8 images, so that one dot product checks that all
    floats are finite and one comparison checks that no environment ended or reset.
    """

    def __init__(self, spec: EnvSpec, slot: int, block: NDArray[np.uint8] | None = None) -> None:
        n, size = spec.num_envs, math.prod(spec.frame_shape)
        self.slot = slot  # 0 or 1: which of the two alternating buffers
        # Set if scores have other episode ends than the learner.
        self.score_boundaries: ScoreBoundaries | None = None
        block = np.zeros(buffer_bytes(spec), np.uint8) if block is None else block
        shape = (n, *spec.frame_shape)
        of_floats = n * size if spec.dtype == "float32" else 0
        self._floats = block[: 4 * (n + of_floats)].view(np.float32)
        block = block[self._floats.nbytes :]
        names = len(spec.info_metrics)
        # [N, M] values of `env.info_metrics` at episode ends; NaN: not reported.
        self.info = block[: 4 * n * names].view(np.float32).reshape(n, names)
        block = block[self.info.nbytes :]
        self.reward = self._floats[:n]
        flags = block[: 3 * n].view(np.bool_)
        self._flags = flags
        self.terminated, self.truncated, self.valid = flags.reshape(3, n)
        images = block[3 * n :]
        self.obs: NDArray[Any] = (self._floats[n:] if of_floats else images).reshape(shape)
        self.frames = list(self.obs)  # one view per environment
        self._ordinary = bytes(2 * n) + b"\1" * n

    def set_reset(self, env: int) -> None:
        """Mark one environment's step as a reset; the caller writes its frame."""
        self.reward[env] = 0.0
        self.terminated[env] = self.truncated[env] = self.valid[env] = False

    def set_all_reset(self) -> None:
        """Mark every environment's step as a reset."""
        self.score_boundaries = None
        self.reward[:] = 0.0
        self._flags[:] = False

    def is_plain_step(self) -> bool:
        """Return whether every environment stepped and no episode ended."""
        return self._flags.tobytes() == self._ordinary

    def is_finite(self) -> bool:
        """Return whether rewards and observations are finite.

        One dot product decides it unless squares overflow; only then each element is checked.
        """
        floats = self._floats
        try:
            if math.isfinite(floats.dot(floats)):
                return True
        # An environment has called np.seterr(all="raise"), or warnings are errors.
        except (FloatingPointError, RuntimeWarning):
            pass
        return bool(np.isfinite(floats).all())

    def first_non_finite(self) -> tuple[str, int, tuple[int, ...], str]:
        """Return array name, environment, element and value of the first non-finite number."""
        for name, array in (("reward", self.reward), ("observation", self.obs)):
            finite = np.isfinite(array)
            if not finite.all():
                place = tuple(np.argwhere(~finite)[0].tolist())
                beyond = ", or beyond float32" * bool(np.isinf(array[place]))
                return name, place[0], place[1:], f"{array[place]}{beyond}"
        raise ValueError("all numbers are finite")


def buffer_bytes(spec: EnvSpec) -> int:
    """Return the bytes of one step buffer."""
    frame = math.prod(spec.frame_shape) * (4 if spec.dtype == "float32" else 1)
    return spec.num_envs * (frame + 4 + 4 * len(spec.info_metrics) + 3)


class SharedStepBuffers:
    """Shared memory of worker processes: two step buffers, actions, and each worker's progress.

    progress [N, 2]: number of the episode, and whether it has ended.
    """

    def __init__(self, spec: EnvSpec, memory: Any) -> None:
        n, out = spec.num_envs, buffer_bytes(spec)
        first, second, rest = np.split(
            np.frombuffer(memory, np.uint8), [_aligned(out), 2 * _aligned(out)]
        )
        self.buffers = (StepBuffer(spec, 0, first[:out]), StepBuffer(spec, 1, second[:out]))
        self.progress = rest[: 16 * n].view(np.int64).reshape(n, 2)
        dtype, shape = action_layout(spec.action)
        self.actions = rest[16 * n :].view(dtype).reshape(n, *shape)

    @staticmethod
    def size(spec: EnvSpec) -> int:
        """Return the bytes of the shared memory."""
        dtype, shape = action_layout(spec.action)
        action = math.prod(shape) * dtype.itemsize
        return 2 * _aligned(buffer_bytes(spec)) + spec.num_envs * (16 + action)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def action_layout(spec: ActionSpec) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of one action as agents send it."""
    if isinstance(spec, BoxActions):
        return np.dtype(np.float32), (len(spec.low),)
    if isinstance(spec, MultiDiscreteActions):
        return np.dtype(np.int64), (len(spec.nvec),)
    return np.dtype(np.int64), (spec.n,) if isinstance(spec, MultiBinaryActions) else ()
