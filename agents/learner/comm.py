"""What the processes of one run agree on: nothing where there is one, sums where there are more.

`training/distributed/comm.py` has the other kind, of several processes. Every call that says
"together" is made by all of them, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Comm:
    """A process alone: what it has is what all have."""

    rank, size = 0, 1
    is_single = True  # there is nobody to agree with; asked too often to be computed

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Together: make a tensor the sum of all ranks', which is the same to the last bit."""
        return tensor

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """Together: return the largest of all ranks', number by number."""
        return list(numbers)

    def all_gather(self, plain: Any) -> list[Any]:
        """Together: return what every rank has, which JSON can write, in their order."""
        return [plain]

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Together: give tensors the values of rank 0's."""

    def long_operation(self) -> AbstractContextManager[None]:
        """Do something inside that may take longer than a row, while the others wait."""
        return nullcontext()

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Let the others know of an error inside."""
        return nullcontext()

    def global_count(self, valid: NDArray[np.bool_]) -> int:
        """Return how many steps of all ranks a row adds, of which these [N] are this one's."""
        return int(np.count_nonzero(valid))


SINGLE_PROCESS = Comm()
