"""Whether images use the range that their space declares: a network hardly sees 0 and 1 of 255."""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import NDArray

from steadyrl.envs.types import EnvSpec

log = logging.getLogger("steadyrl")

FIRST_TIMESTEPS = 100
FEW_LEVELS = 32  # of 256 levels


class PixelRangeCheck:
    """Note the levels of the first rows; then say once if they are few, and what scales them."""

    def __init__(self, spec: EnvSpec, limits: tuple[float, float]) -> None:
        self._id = spec.id
        self._limits = limits
        self._height = spec.unmasked.frame_shape[1]  # below it lie masks
        self._timesteps = 0
        self._darkest, self._brightest = 255, 0

    def check(self, frames: NDArray[Any], timesteps: int = 1) -> bool:
        """Look at the last frames [N, C, H, W] of so many rows; return whether that was enough."""
        images = frames[:, :, : self._height]
        self._darkest = min(self._darkest, int(images.min()))
        self._brightest = max(self._brightest, int(images.max()))
        self._timesteps += timesteps
        if self._timesteps < FIRST_TIMESTEPS:
            return False
        # Where all is of one level nothing was seen yet that could be scaled.
        if 0 < self._brightest - self._darkest < FEW_LEVELS:
            self._warn()
        return True

    def _warn(self) -> None:
        low, high = self._limits
        least, most = (
            low + level * (high - low) / 255 for level in (self._darkest, self._brightest)
        )
        log.warning(
            "%s: what is seen uses %g…%g of %g…%g: env.image_range=[%g,%g] scales it",
            *(self._id, least, most, low, high, least, most),
        )
