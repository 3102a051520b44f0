"""Training metrics that cannot leak: detached when recorded, summed on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Metrics(NamedTuple):
    """K named numbers as one detached tensor that stays on its device."""

    names: tuple[str, ...]
    values: Tensor  # [K]
