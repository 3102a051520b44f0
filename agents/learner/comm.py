"""Collectives of the processes of one run; `Comm` itself is the no-op for a single process.

`training/distributed/comm.py` implements them for several ranks. A call marked "Collective" must
be made by all ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Comm:
    """Collectives of a single process: every result is the process's own value."""

    rank, size = 0, 1
    is_single = True  # read in hot loops: an attribute, not a property

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Collective: replace a tensor by the sum over all ranks, bitwise equal on each."""
        return tensor

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """Collective: return the elementwise maximum over all ranks."""
        return list(numbers)

    def all_gather(self, plain: Any) -> list[Any]:
        """Collective: return the JSON-serialisable value of every rank, in rank order."""
        return [plain]

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Collective: copy rank 0's values into these tensors."""

    def long_operation(self) -> AbstractContextManager[None]:
        """Mark a block that may exceed the step timeout, so that other ranks keep waiting."""
        return nullcontext()

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Report an exception raised inside to the other ranks."""
        return nullcontext()

    def global_count(self, valid: NDArray[np.bool_]) -> int:
        """Return the valid steps of all ranks at this timestep; `valid` [N] are this rank's."""
        return int(np.count_nonzero(valid))


SINGLE_PROCESS = Comm()
