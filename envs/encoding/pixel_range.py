"""Warn if images or bytes use little of their range: 0 and 1 of 255 look alike to a network."""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import NDArray

from steadyrl.envs.types import EnvSpec

log = logging.getLogger("steadyrl")

FIRST_TIMESTEPS = 100
FEW_LEVELS = 32  # of 256
SCALED = "env.image_range=[%g,%g] would scale them, and clip other values"
UNSCALED = (
    "bytes are divided by 255: env.wrappers=[{DtypeObservation: {dtype: numpy:float32}}] would "
    "leave them as they are"
)


class PixelRangeCheck:
    """Track the range of the first timesteps of images, or vectors of bytes; warn if narrow."""

    def __init__(self, spec: EnvSpec, limits: tuple[float, float]) -> None:
        self._id = spec.id
        self._limits = limits
        first, *rest = spec.unmasked.frame_shape
        self._is_image = bool(rest)
        self._end = rest[0] if rest else first  # action masks follow
        self._timesteps = 0
        self._darkest, self._brightest = 255, 0

    def check(self, frames: NDArray[Any], timesteps: int = 1) -> bool:
        """Track frames [N, …], the newest of `timesteps`; return whether it is done."""
        seen = frames[:, :, : self._end] if self._is_image else frames[:, : self._end] * 255
        self._darkest = min(self._darkest, round(float(seen.min())))
        self._brightest = max(self._brightest, round(float(seen.max())))
        self._timesteps += timesteps
        if self._timesteps < FIRST_TIMESTEPS:
            return False
        # Constant values say nothing about the range.
        if 0 < self._brightest - self._darkest < FEW_LEVELS:
            self._warn()
        return True

    def _warn(self) -> None:
        low, high = self._limits
        least, most = (
            low + level * (high - low) / 255 for level in (self._darkest, self._brightest)
        )
        used = f"{self._id}: observations use {least:g}…{most:g} of {low:g}…{high:g}"
        log.warning("%s: %s", used, SCALED % (least, most) if self._is_image else UNSCALED)
