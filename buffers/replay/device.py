"""The replay on an accelerator: tensors there, the same results with torch operations.

The bookkeeping of the timeline stays on the host, which sees every row anyway; only numbers flow
to the device, and nothing is asked back, so adding and drawing never wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.replay.block_sums import BlockSums
from steadyrl.buffers.replay.buffer import NOTHING_YET, ReplayBatch, ReplayBuffer
from steadyrl.buffers.replay.index import ENDED, TERMINATED, VALID, ReplayLayout
from steadyrl.buffers.transfer import send
from steadyrl.core.cuda_graph import Recorded


class DeviceReplay(ReplayBuffer):
    """Keep the rows, their flags and the priorities on the device that learns."""

    _priorities: BlockSums | None

    def __init__(
        self,
        layout: ReplayLayout,
        *,
        alpha: float,
        gamma: float,
        device: torch.device,
        seed: int,
        recorded: bool = False,
    ) -> None:
        """Make room; `recorded`: a draw, and an update of priorities, are one launch each."""
        blocks = None
        if layout.prioritized:
            blocks = BlockSums(layout.slots, alpha, device, recorded=recorded)
        super().__init__(layout, blocks, seed)
        self._deliver = Recorded(self._gather, "a draw") if recorded else self._gather
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
        scratch = 8 * (2 * layout.n_step + 1 + layout.frame_stack)
        return layout.slots * (layout.row_bytes + 1) + priorities + scratch

    @property
    @override
    def nbytes(self) -> int:
        return super().nbytes + self._flags.nbytes

    @override
    def add(
        self,
        action: NDArray,
        reward: NDArray,
        terminated: NDArray,
        truncated: NDArray,
        valid: NDArray,
        next_obs: NDArray,
    ) -> None:
        if next_obs.shape != self._expected:
            raise self._misfit(next_obs)
        slot, rows, flags = self.timeline.slot, self._layout.rows, self.timeline.flags
        born, dead = self.timeline.advance(terminated, truncated, valid)
        before = (slot - 1) % rows  # a cut changes what the row before was
        sent = send(
            self._device, np.asarray(action, np.int64), np.asarray(reward, np.float32),
            flags[before], flags[slot], born, dead, next_obs[:, self._newest :],
        )  # fmt: skip
        self._action[slot], self._reward[slot], self._flags[before], self._flags[slot] = sent[:4]
        if self._priorities is not None and len(born) + len(dead):
            self._priorities.revise(sent[4], sent[5])
        self._frames[self.timeline.slot] = sent[6]

    @override
    def sample(self, n: int, *, beta: float = 1.0) -> ReplayBatch:
        if not self.timeline.count:
            raise RuntimeError(NOTHING_YET)
        asked: NDArray[Any] = np.empty(n, np.int64)
        uniform = self._random.random(n)
        if self._priorities is None:
            self.timeline.pick(uniform, asked)
        else:
            asked = self._priorities.asked(uniform, beta)
        batch: ReplayBatch = self._deliver(send(self._device, asked)[0])
        return batch

    @override
    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        if self._priorities is not None:
            self._priorities.update(index, td_error)

    @override
    def clear(self) -> None:
        super().clear()
        self._flags.zero_()

    @override
    def continue_from(self, outline: Mapping[str, Any]) -> None:
        super().continue_from(outline)
        self._flags.copy_(torch.from_numpy(self.timeline.flags))

    @override
    def _stored(self) -> dict[str, Tensor]:
        return {"frames": self._frames, "action": self._action, "reward": self._reward}

    def _gather(self, asked: Tensor) -> ReplayBatch:
        """Return the transitions asked for: the shares of priorities and −β [B + 1], or ids [B]."""
        if self._priorities is not None:
            return self._read(*self._priorities.draw(asked))
        return self._read(asked, torch.ones(len(asked), device=self._device))

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
        discount = self._gammas[steps].masked_fill((last & TERMINATED) != 0, 0.0)
        return ReplayBatch(
            obs=self._stacks(start, env),
            action=self._action.view(-1)[index],
            reward=earned.masked_fill(~inside, 0.0).sum(1).float(),
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
