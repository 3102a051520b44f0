"""The replay's home in host memory: NumPy arrays shared with torch, read by Numba kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.arrays import touched_zeros
from buffers.batch import ReplayBatch
from buffers.delivery import Delivery
from buffers.layout import ReplayLayout
from buffers.sum_tree import SumTree
from buffers.timeline import Timeline
from buffers.windows import read_windows


class _Output(NamedTuple):
    """A batch of one size: its tensors, and the arrays that share their memory."""

    batch: ReplayBatch
    obs: NDArray  # [B, stack, F]
    action: NDArray[np.int64]
    reward: NDArray[np.float32]
    discount: NDArray[np.float32]
    next_obs: NDArray  # [B, stack, F]
    weight: NDArray[np.float32]
    drawn: NDArray[np.int64]


class HostHome:
    """Frames, actions and rewards of all rows, and their priorities if there are any."""

    def __init__(
        self,
        layout: ReplayLayout,
        timeline: Timeline,
        tree: SumTree | None,
        *,
        gamma: float,
        device: torch.device,
    ) -> None:
        self._layout, self._timeline, self._tree = layout, timeline, tree
        rows, envs = layout.rows, layout.num_envs
        self._frames: NDArray = touched_zeros((rows, envs, *layout.frame_shape), layout.dtype)
        self._frames_flat = self._frames.reshape(rows * envs, layout.frame_size)
        self._action: NDArray[np.int64] = touched_zeros((rows, envs), np.int64)
        self._reward: NDArray[np.float32] = touched_zeros((rows, envs), np.float32)
        self._gammas = gamma ** np.arange(layout.n_step + 1, dtype=np.float64)
        self._chosen = np.zeros((2, layout.frame_stack), np.int64)
        self._delivery = Delivery(device)
        self._output = self._make_output(1)

    @staticmethod
    def bytes_needed(layout: ReplayLayout) -> int:
        """Return the bytes of this home: timeline and priorities included."""
        tree = SumTree.bytes_needed(layout.slots) if layout.prioritized else 0
        return layout.slots * layout.row_bytes + Timeline.bytes_needed(layout) + tree

    @property
    def nbytes(self) -> int:
        """Bytes held, except for the batch being handed out."""
        own = self._frames.nbytes + self._action.nbytes + self._reward.nbytes
        return own + (self._tree.nbytes if self._tree else 0)

    def put_frame(self, slot: int, frame: NDArray) -> None:
        """Store the newest frame of every environment, [N, *frame_shape]."""
        self._frames[slot] = frame

    def put_row(self, slot: int, action: NDArray, reward: NDArray) -> None:
        """Store what was done on a row and what it earned."""
        self._action[slot] = action
        self._reward[slot] = reward

    def revise(self, slot: int, born: NDArray[np.int64], dead: NDArray[np.int64]) -> None:
        """Take over what closing the row in `slot` changed."""
        if self._tree is not None:
            self._tree.revise(born, dead)

    def sample(self, uniform: NDArray[np.float64], beta: float) -> ReplayBatch:
        """Return one transition per number in [0, 1)."""
        self._delivery.before_write()
        if len(uniform) != len(self._output.drawn):
            self._output = self._make_output(len(uniform))
        out = self._output
        if self._tree is None:
            self._timeline.pick(uniform, out.drawn)
        else:
            self._tree.draw(uniform, beta, out.drawn, out.weight)
        read_windows(
            self._timeline.flags, self._frames_flat, self._action, self._reward, self._gammas,
            out.drawn, self._chosen, out.obs, out.next_obs, out.action, out.reward, out.discount,
        )  # fmt: skip
        return self._delivery.deliver(out.batch)

    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """Set the priorities of drawn transitions; without priorities there is nothing to do."""
        if self._tree is not None:
            mine = self._output
            drawn = mine.drawn if index is mine.batch.index else index.numpy(force=True)
            self._tree.update(drawn, td_error.numpy(force=True))

    def clear(self) -> None:
        """Forget the priorities; rows that the timeline does not know are never read."""
        if self._tree is not None:
            self._tree.clear()

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the first `rows` rows as tensors that share this memory."""
        state: dict[str, Any] = {
            "frames": torch.from_numpy(self._frames[:rows]),
            "action": torch.from_numpy(self._action[:rows]),
            "reward": torch.from_numpy(self._reward[:rows]),
        }
        if self._tree is not None:
            state["priorities"] = self._tree.state_dict(rows * self._layout.num_envs)
        return state

    def load_state_dict(self, state: dict[str, Any], rows: int) -> None:
        """Take back the first `rows` rows."""
        np.copyto(self._frames[:rows], state["frames"].cpu().numpy())
        np.copyto(self._action[:rows], state["action"].cpu().numpy())
        np.copyto(self._reward[:rows], state["reward"].cpu().numpy())
        if self._tree is not None:
            self._tree.load_state_dict(state["priorities"])

    def _make_output(self, size: int) -> _Output:
        layout, empty = self._layout, self._delivery.empty
        stacked = (size, layout.frame_stack, layout.frame_size)
        dtype = torch.from_numpy(self._frames[:0]).dtype
        batch = ReplayBatch(
            obs=empty((size, *layout.observation_shape), dtype),
            action=empty((size,), torch.int64),
            reward=empty((size,), torch.float32),
            discount=empty((size,), torch.float32),
            next_obs=empty((size, *layout.observation_shape), dtype),
            weight=empty((size,), torch.float32).fill_(1.0),
            index=empty((size,), torch.int64),
        )
        arrays = {name: part.numpy() for name, part in batch._asdict().items()}
        arrays["obs"] = arrays["obs"].reshape(stacked)
        arrays["next_obs"] = arrays["next_obs"].reshape(stacked)
        arrays["drawn"] = arrays.pop("index")
        return _Output(batch, **arrays)
