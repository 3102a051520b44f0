"""Warn if images use little of their declared range: 0 and 1 of 255 look alike to a network."""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import NDArray

from steadyrl.envs.types import EnvSpec

log = logging.getLogger("steadyrl")

FIRST_TIMESTEPS = 100
FEW_LEVELS = 32  # of 256


class PixelRangeCheck:
    """Track the pixel range of the first timesteps; then warn once if it is narrow."""

    def __init__(self, spec: EnvSpec, limits: tuple[float, float]) -> None:
        self._id = spec.id
        self._limits = limits
        self._height = spec.unmasked.frame_shape[1]  # action masks follow below
        self._timesteps = 0
        self._darkest, self._brightest = 255, 0

    def check(self, frames: NDArray[Any], timesteps: int = 1) -> bool:
        """Track frames [N, C, H, W], the newest of `timesteps`; return whether it is done."""
        images = frames[:, :, : self._height]
        self._darkest = min(self._darkest, int(images.min()))
        self._brightest = max(self._brightest, int(images.max()))
        self._timesteps += timesteps
        if self._timesteps < FIRST_TIMESTEPS:
            return False
        # A constant image says nothing about the range.
        if 0 < self._brightest - self._darkest < FEW_LEVELS:
            self._warn()
        return True

    def _warn(self) -> None:
        low, high = self._limits
        least, most = (
            low + level * (high - low) / 255 for level in (self._darkest, self._brightest)
        )
        log.warning(
            "%s: observations use %g…%g of %g…%g: env.image_range=[%g,%g] would scale them",
            *(self._id, least, most, low, high, least, most),
        )
