"""Replay buffer in accelerator memory: same results as `HostReplay`, with torch operations.

The timeline's bookkeeping stays on the host, which sees every timestep anyway. Data flows only from
host to device, so neither `add` nor `sample` synchronises with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.memory_layout import PackedInputs, send
from steadyrl.buffers.replay.block_sums import BlockSums
from steadyrl.buffers.replay.buffer import NOT_SAMPLEABLE, ReplayBatch, ReplayBuffer
from steadyrl.buffers.replay.timeline import ENDED, TERMINATED, VALID, ReplayLayout
from steadyrl.core.cuda_graph import CudaGraphed


class DeviceReplay(ReplayBuffer):
    """Store timesteps, flags and priorities on the training device."""

    _priorities: BlockSums | None

    def __init__(
        self,
        layout: ReplayLayout,
        *,
        alpha: float,
        gamma: float,
        device: torch.device,
        seed: int,
        cuda_graph: bool = False,
    ) -> None:
        """Allocate; `cuda_graph`: storing, sampling and priority updates are one launch each."""
        blocks = None
        if layout.prioritized:
            blocks = BlockSums(layout.slots, alpha, device, cuda_graph=cuda_graph)
        super().__init__(layout, blocks, seed)
        self._draw = CudaGraphed(self._draw_batch, "a draw") if cuda_graph else self._draw_batch
        self._device = device
        ring_size, envs = layout.ring_size, layout.num_envs
        dtype = getattr(torch, layout.dtype)
        self._frames = torch.zeros(
            (ring_size, envs, *layout.frame_shape), dtype=dtype, device=device
        )
        self._frames_flat = self._frames.view(ring_size * envs, *layout.frame_shape)
        self._action = torch.zeros((ring_size, envs), dtype=torch.int64, device=device)
        self._reward = torch.zeros((ring_size, envs), dtype=torch.float32, device=device)
        self._flags = torch.zeros((ring_size, envs), dtype=torch.uint8, device=device)
        powers = gamma ** np.arange(layout.n_step + 1, dtype=np.float64)
        self._gammas = torch.from_numpy(powers).to(device)
        self._ahead = torch.arange(layout.n_step, device=device)
        self._back = torch.arange(1, layout.frame_stack, device=device)
        # Ids added, then ids evicted, both padded with the pending timestep's id, whose priority is
        # to stay 0: padding among the added gives it one, and at least one padding among the
        # evicted (hence + 1) sets it back to 0.
        self._changed = np.empty(envs * layout.reach + envs * (layout.reach + 1) + 1, np.int64)
        self._timestep = PackedInputs(
            (
                (torch.int64, (3,)),
                (torch.int64, (1, envs)),
                (torch.float32, (1, envs)),
                (torch.uint8, (2, envs)),
                (torch.int64, self._changed.shape),
                (dtype, (1, envs, *layout.frame_shape)),
            ),
            device,
        )
        self._store = CudaGraphed(self._write, "an append") if cuda_graph else self._write

    @staticmethod
    def bytes_needed(layout: ReplayLayout) -> int:
        """Return the bytes on the device, without the timeline (host memory)."""
        priorities = BlockSums.bytes_needed(layout.slots) if layout.prioritized else 0
        scratch = 8 * (2 * layout.n_step + 1 + layout.frame_stack)
        return layout.slots * (layout.slot_bytes + 1) + priorities + scratch

    @property
    @override
    def nbytes(self) -> int:
        return super().nbytes + self._flags.nbytes

    @property
    @override
    def host_nbytes(self) -> int:
        return self.nbytes if self._device.type == "cpu" else self.timeline.nbytes

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
        if next_obs.shape != self._obs_shape:
            raise self._shape_error(next_obs)
        timeline, ring_size, envs = self.timeline, self._layout.ring_size, self._layout.num_envs
        entry = timeline.entry
        added, evicted = timeline.advance(terminated, truncated, valid)
        before = (entry - 1) % ring_size  # a forced reset truncates the timestep before
        changed, most_added = self._changed, envs * self._layout.reach
        changed[:] = timeline.entry * envs  # of the pending timestep, which has no priority
        changed[: len(added)] = added
        changed[most_added : most_added + len(evicted)] = evicted
        entries = np.array((before, entry, timeline.entry))
        flags = timeline.flags[[before, entry]]
        self._timestep.send(entries, action, reward, flags, changed, next_obs[:, self._newest :])
        self._store()

    def _write(self) -> None:
        """Store the timestep that was sent."""
        entries, action, reward, flags, changed, frames = self._timestep.tensors
        self._action.index_copy_(0, entries[1:2], action)
        self._reward.index_copy_(0, entries[1:2], reward)
        self._flags.index_copy_(0, entries[:2], flags)
        self._frames.index_copy_(0, entries[2:], frames)
        if self._priorities is not None:
            most_added = self._layout.num_envs * self._layout.reach
            self._priorities.add_and_evict(changed[:most_added], changed[most_added:])

    @override
    def sample(self, n: int, *, beta: float = 1.0) -> ReplayBatch:
        if not self.timeline.count:
            raise RuntimeError(NOT_SAMPLEABLE)
        draw_inputs: NDArray[Any] = np.empty(n, np.int64)
        uniform = self._random.random(n)
        if self._priorities is None:
            self.timeline.draw(uniform, draw_inputs)
        else:
            draw_inputs = self._priorities.draw_inputs(uniform, beta)
        batch: ReplayBatch = self._draw(send(self._device, draw_inputs)[0])
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
    def load_metadata(self, metadata: Mapping[str, Any]) -> None:
        super().load_metadata(metadata)
        self._flags.copy_(torch.from_numpy(self.timeline.flags))

    @override
    def _stored(self) -> dict[str, Tensor]:
        return {"frames": self._frames, "action": self._action, "reward": self._reward}

    def _draw_batch(self, draw_inputs: Tensor) -> ReplayBatch:
        """Return the batch for `draw_inputs`: [B + 1] with priorities, ids [B] without."""
        if self._priorities is not None:
            return self._gather_windows(*self._priorities.draw(draw_inputs))
        return self._gather_windows(draw_inputs, torch.ones(len(draw_inputs), device=self._device))

    def _gather_windows(self, index: Tensor, weight: Tensor) -> ReplayBatch:
        """Gather the transitions whose n-step windows start at ids `index` [B]."""
        envs, ring_size = self._layout.num_envs, self._layout.ring_size
        start, env = index // envs, index % envs
        slots = (start[:, None] + self._ahead) % ring_size * envs + env[:, None]  # [B, n]
        state = self._flags.view(-1)[slots]
        ended = (state & ENDED) != 0
        inside = ended.cumsum(1) == ended  # up to and including the episode's last timestep
        steps = inside.sum(1)
        earned = self._reward.view(-1)[slots] * self._gammas[:-1]
        last = state.gather(1, steps[:, None] - 1)[:, 0]
        discount = self._gammas[steps].masked_fill((last & TERMINATED) != 0, 0.0)
        return ReplayBatch(
            obs=self._gather_stacks(start, env),
            action=self._action.view(-1)[index],
            reward=earned.masked_fill(~inside, 0.0).sum(1).float(),
            discount=discount.float(),
            next_obs=self._gather_stacks((start + steps) % ring_size, env),
            weight=weight,
            index=index,
        )

    def _gather_stacks(self, timestep: Tensor, env: Tensor) -> Tensor:
        """Return frame stacks [B, k·C, …] ending at `timestep` [B], oldest frame first.

        Stacks do not reach into the previous episode: its first frame is repeated instead.
        """
        envs, ring_size = self._layout.num_envs, self._layout.ring_size
        if self._layout.frame_stack == 1:
            return self._frames_flat[timestep * envs + env]
        before = (timestep[:, None] - self._back) % ring_size * envs + env[:, None]  # [B, k - 1]
        same = (self._flags.view(-1)[before] & VALID).cumprod(1)
        age = torch.cat((torch.zeros_like(timestep)[:, None], same.cumsum(1)), 1).flip(1)
        frames = self._frames_flat[(timestep[:, None] - age) % ring_size * envs + env[:, None]]
        return frames.flatten(1, 2)
