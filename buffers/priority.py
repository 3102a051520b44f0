"""What a priority is: p = (|δ| + ε)^α, and the refusal of errors that are not numbers."""

from __future__ import annotations

import math

from numpy.typing import NDArray
from torch import Tensor

from memory.errors import NonFiniteError

EPSILON = 1e-6  # keeps a transition without error drawable; ε in Schaul et al. 2016, §3.3


def check_shapes(index: Tensor | NDArray, td_error: Tensor | NDArray) -> None:
    """Refuse [B, 1] beside [B], which would broadcast to B × B."""
    if index.shape != td_error.shape or index.ndim != 1:
        raise ValueError(
            f"update_priorities: index {tuple(index.shape)} and td_error {tuple(td_error.shape)}"
            " must both be [B]"
        )


def refuse(place: int, index: int, error: float, slots: int) -> Exception:
    """Return the exception for a refused (id, error) pair."""
    if math.isfinite(error):
        return IndexError(f"update_priorities: index[{place}]={index} is not in [0, {slots})")
    return NonFiniteError(
        f"td_error[{place}]={error} for transition {index}: a priority must be a finite number;"
        " lower the learning rate or look for infinite rewards"
    )
