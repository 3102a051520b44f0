"""What a replay needs of the memory it lives in, on the host or on an accelerator."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from buffers.batch import ReplayBatch


class Home(Protocol):
    """Frames, actions and rewards of all rows, and their priorities if there are any.

    Homes give and take the same state, so what one saved the other can load.
    """

    @property
    def nbytes(self) -> int:
        """Bytes held, except for the batch being handed out."""
        ...

    def put_frame(self, slot: int, frame: NDArray) -> None:
        """Store the newest frame of every environment, [N, *frame_shape]."""
        ...

    def put_row(self, slot: int, action: NDArray, reward: NDArray) -> None:
        """Store what was done on a row and what it earned, [N] each."""
        ...

    def revise(self, slot: int, born: NDArray[np.int64], dead: NDArray[np.int64]) -> None:
        """Take over what closing the row in `slot` changed: flags, ids born, then ids dead."""
        ...

    def sample(self, uniform: NDArray[np.float64], beta: float) -> ReplayBatch:
        """Return one transition per number in [0, 1), which may be used up."""
        ...

    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """Set the priorities of drawn transitions; without priorities there is nothing to do."""
        ...

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        ...

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the first `rows` rows as tensors that may share this memory."""
        ...

    def load_state_dict(self, state: dict[str, Any], rows: int) -> None:
        """Take back the first `rows` rows; the timeline has its state already."""
        ...
