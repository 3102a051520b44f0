"""Find the first number that is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.errors import NonFiniteError


def check_finite(array: NDArray[Any] | Tensor, name: str, *, step: int) -> None:
    """Raise NonFiniteError naming the tensor, the step and the environment (first axis).

    A tensor on an accelerator is waited for; keep such checks out of the hot path.
    """
    if isinstance(array, Tensor):
        if not array.is_floating_point() or bool(torch.isfinite(array).all()):
            return
        array = array.detach().to("cpu", torch.float64).numpy()
    elif array.dtype.kind not in "fc" or np.isfinite(array).all():
        return
    index = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
    where = f" in environment {index[0]}" if index else ""
    element = f" (element {list(index[1:])})" if len(index) > 1 else ""
    raise NonFiniteError(
        f"{name} is {array[index]} at step {step:,}{where}{element}: "
        "the run stops rather than learn from it"
    )
