"""What a compiled environment (kernel) consists of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

# The least and the most that a number of a kernel's state can be.
Range = tuple[float, float]

ANY_REAL: Range = (-math.inf, math.inf)  # but none that is not finite

ANY_WHOLE: Range = (-(2**63), 2**63 - 1)


@dataclass(frozen=True)
class Kernel:
    """One compiled function that steps N environments, and the sizes of what it works on.

    `step(sim, action, outcome)` is described in `envs/kernels/state.py`. State is loaded from
    files, and compiled code does not check indices: a number used as an index must declare its
    range. A count instead of ranges allows any value. `validate(float_state, int_state)` gets the
    numbers [R] and [W] of one environment and may raise ValueError for an inconsistent state.
    """

    step: Callable[..., None]
    frame: tuple[int, ...]  # shape of an observation: a vector of float32, or an image
    action: spaces.Discrete | spaces.Box
    float_state: int | Sequence[Range] = 0  # numbers of its state that are real
    int_state: int | Sequence[Range] = 0  # and that are whole
    constants: Sequence[float] | NDArray[np.float64] = ()  # what its keywords decide
    images: bool = False  # frames are bytes, channels first
    generator_words: int = 6
    validate: Callable[[NDArray[np.float64], NDArray[np.int64]], None] | None = None

    def __post_init__(self) -> None:
        axes = 3 if self.images else 1
        if len(self.frame) != axes or min(self.frame) < 1:
            needs = "[channels, height, width]" if self.images else "[numbers] as vectors are"
            raise ValueError(f"a kernel's frame is {needs}, not {self.frame}")

        for least, most in (*self.float_ranges, *self.int_ranges):
            if not least <= most:
                raise ValueError(f"a kernel's number cannot be {least} to {most}")

    @property
    def float_ranges(self) -> Sequence[Range]:
        """What each real number can be."""
        return (
            (ANY_REAL,) * self.float_state
            if isinstance(self.float_state, int)
            else self.float_state
        )

    @property
    def int_ranges(self) -> Sequence[Range]:
        """What each whole number can be."""
        return (ANY_WHOLE,) * self.int_state if isinstance(self.int_state, int) else self.int_state

    @property
    def dtype(self) -> str:
        """The type of its frames."""
        return "uint8" if self.images else "float32"
