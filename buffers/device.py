"""The replay's home on an accelerator: tensors there, the same results with torch operations.

The bookkeeping of the timeline stays on the host, which sees every row anyway; only numbers flow
to the device, and nothing is asked back, so adding and drawing never wait for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.batch import ReplayBatch
from buffers.block_sums import BlockSums
from buffers.layout import ReplayLayout
from buffers.timeline import ENDED, TERMINATED, VALID, Timeline
from buffers.uplink import send


class DeviceHome:
    """Frames, actions, rewards and flags of all rows, and their priorities if there are any."""

    def __init__(
        self,
        layout: ReplayLayout,
        timeline: Timeline,
        priorities: BlockSums | None,
        *,
        gamma: float,
        device: torch.device,
    ) -> None:
        self._layout, self._timeline, self._priorities = layout, timeline, priorities
        self._device = device
        rows, envs = layout.rows, layout.num_envs
        dtype = getattr(torch, layout.dtype)
        self._frames = torch.zeros((rows, envs, *layout.frame_shape), dtype=dtype, device=device)
        self._frames_flat = self._frames.view(rows * envs, *layout.frame_shape)
        self._action = torch.zeros((rows, envs), dtype=torch.int64, device=device)
        self._reward = torch.zeros((rows, envs), dtype=torch.float32, device=device)
        self._flags = torch.zeros((rows, envs), dtype=torch.uint8, device=device)
        powers = gamma ** np.arange(layout.n_step + 1, dtype=np.float64)
        self._gammas = torch.from_numpy(powers).to(device)
        self._ahead = torch.arange(layout.n_step, device=device)
        self._back = torch.arange(1, layout.frame_stack, device=device)

    @staticmethod
    def bytes_needed(layout: ReplayLayout) -> int:
        """Return the bytes on the device; the timeline on the host comes on top."""
        priorities = BlockSums.bytes_needed(layout.slots) if layout.prioritized else 0
        return layout.slots * (layout.row_bytes + 1) + priorities

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        parts = (self._frames, self._action, self._reward, self._flags)
        priorities = self._priorities.nbytes if self._priorities else 0
        return sum(part.nbytes for part in parts) + priorities

    def put_frame(self, slot: int, frame: NDArray) -> None:
        """Store the newest frame of every environment, [N, *frame_shape]."""
        self._frames[slot] = send(frame, self._device)

    def put_row(self, slot: int, action: NDArray, reward: NDArray) -> None:
        """Store what was done on a row and what it earned; float64 carries both exactly."""
        row = send(np.stack((action, reward), dtype=np.float64), self._device)
        self._action[slot], self._reward[slot] = row[0], row[1]

    def revise(self, slot: int, born: NDArray[np.int64], dead: NDArray[np.int64]) -> None:
        """Take over what closing the row in `slot` changed: flags, ids born, then ids dead."""
        flags, before = self._timeline.flags, (slot - 1) % self._layout.rows
        news = np.concatenate((flags[before], flags[slot], born, dead), dtype=np.int64)
        envs = self._layout.num_envs
        sent = send(news, self._device)
        old, new, changed = sent[:envs], sent[envs : 2 * envs], sent[2 * envs :]
        self._flags[before], self._flags[slot] = old, new
        if self._priorities is not None and len(changed):
            self._priorities.revise(changed[: len(born)], changed[len(born) :])

    def sample(self, uniform: NDArray[np.float64], beta: float) -> ReplayBatch:
        """Return one transition per number in [0, 1)."""
        if self._priorities is None:
            picked = np.empty(len(uniform), np.int64)
            self._timeline.pick(uniform, picked)
            index = send(picked, self._device)
            weight = torch.ones(len(uniform), device=self._device)
        else:
            index, weight = self._priorities.draw(uniform, beta)
        return self._read(index, weight)

    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """Set the priorities of drawn transitions; without priorities there is nothing to do."""
        if self._priorities is not None:
            self._priorities.update(index, td_error)

    def clear(self) -> None:
        """Forget flags and priorities; rows that the timeline does not know are never read."""
        self._flags.zero_()
        if self._priorities is not None:
            self._priorities.clear()

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the first `rows` rows as tensors that share this memory."""
        state: dict[str, Any] = {
            "frames": self._frames[:rows],
            "action": self._action[:rows],
            "reward": self._reward[:rows],
        }
        if self._priorities is not None:
            state["priorities"] = self._priorities.state_dict(rows * self._layout.num_envs)
        return state

    def load_state_dict(self, state: dict[str, Any], rows: int) -> None:
        """Take back the first `rows` rows; the timeline has its state already."""
        self._frames[:rows] = state["frames"].to(self._device)
        self._action[:rows] = state["action"].to(self._device)
        self._reward[:rows] = state["reward"].to(self._device)
        self._flags.copy_(torch.from_numpy(self._timeline.flags))
        if self._priorities is not None:
            self._priorities.load_state_dict(state["priorities"])

    def _read(self, index: Tensor, weight: Tensor) -> ReplayBatch:
        """Gather the n-step windows that begin at `index` [B]."""
        envs, rows = self._layout.num_envs, self._layout.rows
        start, env = index // envs, index % envs
        slots = (start[:, None] + self._ahead) % rows * envs + env[:, None]  # [B, n]
        state = self._flags.view(-1)[slots]
        ended = (state & ENDED) != 0
        inside = ended.cumsum(1) == ended  # up to the episode's end, which is itself inside
        steps = inside.sum(1)
        earned = self._reward.view(-1)[slots] * self._gammas[:-1]
        last = state.gather(1, steps[:, None] - 1)[:, 0]
        discount = torch.where((last & TERMINATED) != 0, 0.0, self._gammas[steps])
        return ReplayBatch(
            obs=self._stacks(start, env),
            action=self._action.view(-1)[index],
            reward=torch.where(inside, earned, 0.0).sum(1).float(),
            discount=discount.float(),
            next_obs=self._stacks((start + steps) % rows, env),
            weight=weight,
            index=index,
        )

    def _stacks(self, row: Tensor, env: Tensor) -> Tensor:
        """Return stacks that end at `row` [B], oldest frame first, within the episode."""
        envs, rows = self._layout.num_envs, self._layout.rows
        if self._layout.frame_stack == 1:
            return self._frames_flat[row * envs + env]
        before = (row[:, None] - self._back) % rows * envs + env[:, None]  # [B, k - 1]
        same = (self._flags.view(-1)[before] & VALID).cumprod(1)
        age = torch.cat((torch.zeros_like(row)[:, None], same.cumsum(1)), 1).flip(1)
        frames = self._frames_flat[(row[:, None] - age) % rows * envs + env[:, None]]
        return frames.flatten(1, 2)
