"""Definition of a kernel: an environment compiled to machine code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

# Smallest and largest value of one number of a kernel's state.
Range = tuple[float, float]

ANY_REAL: Range = (-math.inf, math.inf)  # any finite value

ANY_WHOLE: Range = (-(2**63), 2**63 - 1)


@dataclass(frozen=True)
class Kernel:
    """A compiled function that steps N environments, and the layout of its state.

    `step(sim, action, outcome)` is described in `envs/kernels/state.py`. State is loaded from
    files, and compiled code does not check indices: a number used as an index must declare its
    range. A count instead of ranges allows any value. `validate(float_state, int_state)` gets the
    numbers [R] and [W] of one environment and may raise ValueError for an inconsistent state.
    """

    step: Callable[..., None]
    frame: tuple[int, ...]  # shape of an observation: float32 vector, or uint8 image (C, H, W)
    action: spaces.Discrete | spaces.Box
    float_state: int | Sequence[Range] = 0  # float64 state per environment: ranges, or a count
    int_state: int | Sequence[Range] = 0  # int64 state per environment: ranges, or a count
    constants: Sequence[float] | NDArray[np.float64] = ()  # parameters set by keyword arguments
    images: bool = False  # frames are uint8, channels first
    one_hot: bool = False  # frames encode discrete observations
    generator_words: int = 6
    validate: Callable[[NDArray[np.float64], NDArray[np.int64]], None] | None = None

    def __post_init__(self) -> None:
        axes = 3 if self.images else 1
        if len(self.frame) != axes or min(self.frame) < 1:
            needs = "[channels, height, width]" if self.images else "[size]"
            raise ValueError(f"a kernel's frame must be {needs}, not {self.frame}")
        is_box = isinstance(self.action, spaces.Box) and self.action.dtype.kind == "f"
        if not is_box and not isinstance(self.action, spaces.Discrete):
            raise ValueError(f"a kernel's actions must be Discrete or a float Box: {self.action}")
        for least, most in (*self.float_ranges, *self.int_ranges):
            if not least <= most:
                raise ValueError(f"a kernel's number cannot be {least} to {most}")

    @property
    def float_ranges(self) -> Sequence[Range]:
        """Range of each number of `float_state`."""
        return (
            (ANY_REAL,) * self.float_state
            if isinstance(self.float_state, int)
            else self.float_state
        )

    @property
    def int_ranges(self) -> Sequence[Range]:
        """Range of each number of `int_state`."""
        return (ANY_WHOLE,) * self.int_state if isinstance(self.int_state, int) else self.int_state

    @property
    def dtype(self) -> str:
        """dtype of frames."""
        return "uint8" if self.images else "float32"
