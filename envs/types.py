"""What an environment is to the rest of the program: one row of the timeline at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.errors import ExpectedError
from steadyrl.envs.settings import EnvSettings


class EnvironmentFailedError(ExpectedError):
    """An environment failed for good: which one, at which step, and why."""

    exit_code = 4


class Episode(NamedTuple):
    """A finished episode: raw, undiscounted return and length in valid steps."""

    env: int
    return_: float
    length: int
    info: Mapping[str, float] = MappingProxyType({})  # numbers it reported, of those asked for


class Step(NamedTuple):
    """One row of the timeline in all N environments.

    `obs` is what to act on next and, at the same time, the true successor of every valid row
    (also at the end of an episode). Rows with `valid` false are resets: never learn from them.
    The arrays stay untouched until the second step after this one.
    """

    obs: NDArray[Any]  # [N, *observation_shape]
    reward: NDArray[np.float32]  # [N]
    terminated: NDArray[np.bool_]  # [N]
    truncated: NDArray[np.bool_]  # [N]
    valid: NDArray[np.bool_]  # [N]
    episodes: tuple[Episode, ...]


@dataclass(frozen=True)
class DiscreteActions:
    """One choice out of n."""

    n: int


@dataclass(frozen=True)
class MultiDiscreteActions:
    """Several independent choices."""

    nvec: tuple[int, ...]


@dataclass(frozen=True)
class MultiBinaryActions:
    """n independent switches."""

    n: int


@dataclass(frozen=True)
class BoxActions:
    """A bounded vector; the environment clips what it is sent to the bounds."""

    low: tuple[float, ...]
    high: tuple[float, ...]


ActionSpec = DiscreteActions | MultiDiscreteActions | MultiBinaryActions | BoxActions

# So many actions' bits a number of an observation holds exactly.
MASK_BITS = {"float32": 24, "uint8": 8}


class Encoder(NamedTuple):
    """How one observation becomes one frame: its shape, its dtype, and the writing of it.

    `write(observation, frame)` takes one, `write(observations, frames, (N,))` a batch of N as
    Gymnasium batches them; both are the same translation.
    """

    shape: tuple[int, ...]
    dtype: str  # "float32" or "uint8"
    write: Callable[..., None]
    remark: str = ""  # what the user should know about it
    mask: int = 0  # as `EnvSpec.mask`
    # The numbers that 0 and 255 of an image's bytes stand for, where all have the same.
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class EnvSpec:
    """Shapes and dtypes after encoding: float32 vectors, or channels-first uint8 images.

    One frame crosses from the environment per row; the agent sees `frame_stack` of them,
    concatenated along the first axis, oldest first. Frames may end in bits, which say what actions
    are allowed: `mask` numbers of a vector, rows of an image (`envs/encoding/masks.py`).
    """

    id: str
    num_envs: int
    frame_shape: tuple[int, ...]
    dtype: str  # "float32" or "uint8"
    frame_stack: int
    action: ActionSpec
    info_metrics: tuple[str, ...] = ()  # numbers that are reported with finished episodes
    mask: int = 0  # of a frame's numbers or rows; 0: every action is always allowed

    @classmethod
    def of(cls, settings: EnvSettings, encoder: Encoder, action: ActionSpec) -> EnvSpec:
        """Describe environments of single frames."""
        shape, dtype, names = encoder.shape, encoder.dtype, settings.info_metrics
        n, mask = settings.num_envs, encoder.mask
        return cls(settings.id, n, shape, dtype, 1, action, tuple(names), mask)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of an observation, masks and all."""
        return (self.frame_stack * self.frame_shape[0], *self.frame_shape[1:])

    @property
    def unmasked(self) -> EnvSpec:
        """What the same environments would be without masks."""
        first, *rest = self.frame_shape
        if rest:
            rest[0] -= self.mask
        else:
            first -= self.mask
        return replace(self, frame_shape=(first, *rest), mask=0)

    @property
    def unmasked_shape(self) -> tuple[int, ...]:
        """Shape of what the agent sees of an observation."""
        return self.unmasked.observation_shape

    def validate_same(self, purpose: str, found: EnvSpec) -> None:
        """Refuse environments that are built like these and offer something else."""
        for part in ("frame_shape", "dtype", "action", "mask"):
            now, before = getattr(found, part), getattr(self, part)
            if now != before:
                raise EnvironmentFailedError(
                    f"{self.id}: its {part.replace('_', ' ')} for {purpose} is {now}, but it was"
                    f" {before}: it is another whenever it is built"
                )


class BlockResult(NamedTuple):
    """What rows came to: valid steps, and the episodes that ended, each after so many."""

    steps: int
    episodes: tuple[tuple[int, Episode], ...]


# Lets compiled code make rows: `VectorEnv.run`.
StepMany = Callable[[Callable[..., None], int, Any], BlockResult]
# Where it does, the first of its counters: which of two arrays holds what is to be
# decided on, which of two rows is the last, whether to stop, and whether for a broken number.
OBS_SLOT, STEP_SLOT, STOP, NON_FINITE = range(4)
