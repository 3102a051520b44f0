"""Replay buffer in host memory: NumPy arrays shared with torch, sampled by Numba functions."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.memory_layout import PinnedBatch, prefaulted_zeros
from steadyrl.buffers.replay.buffer import NOT_SAMPLEABLE, ReplayBatch, ReplayBuffer
from steadyrl.buffers.replay.delayed_priorities import DelayedPriorities
from steadyrl.buffers.replay.fused_append import COUNTERS, Ring
from steadyrl.buffers.replay.prefetch import prefetch
from steadyrl.buffers.replay.sum_tree import SumTree, draw_stratified
from steadyrl.buffers.replay.timeline import (
    ENDED,
    TERMINATED,
    VALID,
    ReplayLayout,
    Timeline,
    draw_uniform,
)
from steadyrl.core.jit import box, jit


@jit
def stack_slots(flags, slot, frame_slots):  # type: ignore[no-untyped-def]
    """Write the slots of the frames in the stack at `slot`, oldest first.

    The episode's first frame (the timestep after an invalid one) is repeated to fill the stack.
    """
    stack = frame_slots.shape[0]
    envs = flags.shape[1]
    slots = flags.size
    flat = flags.reshape(slots)
    started = False
    for place in range(stack - 1, -1, -1):
        frame_slots[place] = slot
        before = slot - envs if slot >= envs else slot - envs + slots
        started = started or not flat[before] & VALID
        if not started:
            slot = before


@jit
def fetch_windows(flags, frames, actions, rewards, index, reach, size):  # type: ignore[no-untyped-def]
    """Prefetch the cache lines of the first and last timestep of full windows; all arrays flat."""
    slots = flags.size
    for b in range(index.shape[0]):
        start = index[b]
        end = start + reach if start + reach < slots else start + reach - slots
        prefetch(flags, start)
        prefetch(rewards, start)
        prefetch(actions, start)
        prefetch(frames, start * size)
        prefetch(frames, end * size)


@jit
def read_windows(  # type: ignore[no-untyped-def]
    flags,
    frames,
    actions,
    rewards,
    gammas,
    index,
    frame_slots,
    obs,
    next_obs,
    action,
    reward,
    discount,
):
    """Gather B transitions whose n-step windows start at ids `index` [B].

    flags, actions and rewards [R, N], frames [R * N, F], gammas [n + 1] powers of γ;
    obs and next_obs [B, stack, F]. Writes reward = Σ_{k<m} γ^k r_k and discount = γ^m (1 −
    terminated), where m = min(n, steps left in the episode).
    """
    envs, slots = flags.shape[1], flags.size
    n_step = gammas.shape[0] - 1
    stack, size = obs.shape[1], obs.shape[2]
    flat_flags, flat_rewards = flags.reshape(slots), rewards.reshape(slots)
    flat_actions = actions.reshape(slots)
    fetch_windows(
        flat_flags,
        frames.reshape(slots * size),
        flat_actions,
        flat_rewards,
        index,
        n_step * envs,
        size,
    )
    for b in range(index.shape[0]):
        start = slot = index[b]
        steps, total = 0, 0.0
        while True:
            total += gammas[steps] * flat_rewards[slot]
            state = flat_flags[slot]
            steps += 1
            slot = slot + envs if slot + envs < slots else slot + envs - slots
            if steps == n_step or state & ENDED:
                break
        action[b] = flat_actions[start]
        reward[b] = total
        discount[b] = 0.0 if state & TERMINATED else gammas[steps]
        frame_slots[0, stack - 1], frame_slots[1, stack - 1] = start, slot
        if stack > 1:
            stack_slots(flags, start, frame_slots[0])
            stack_slots(flags, slot, frame_slots[1])
        for place in range(stack):
            frame, next_frame = frame_slots[0, place], frame_slots[1, place]
            for i in range(size):
                obs[b, place, i] = frames[frame, i]
            for i in range(size):
                next_obs[b, place, i] = frames[next_frame, i]


@jit
def draw_windows(boxed, beta):  # type: ignore[no-untyped-def]
    """Sample transitions (by priority if there is a tree, else uniformly) and gather them.

    Overwrites the uniform numbers it is given.
    """
    (
        nodes, minima, offsets, sampleable, cursors, uniform, weight,
        flags, frames, actions, rewards, gammas, index,
        frame_slots, obs, next_obs, action, reward, discount,
    ) = boxed.value  # fmt: skip
    if len(nodes):
        draw_stratified(nodes, minima, offsets, uniform, beta, uniform, index, weight)
    else:
        draw_uniform(sampleable, cursors, uniform, index)
    read_windows(
        flags, frames, actions, rewards, gammas, index,
        frame_slots, obs, next_obs, action, reward, discount,
    )  # fmt: skip


class Output(NamedTuple):
    """Preallocated output of one batch size."""

    batch: Any  # that `sample` returns, on the training device
    uniform: NDArray[np.float64]  # [B] in [0, 1): what is drawn by them
    drawn: NDArray[np.int64]  # [B] ids of starts: `batch.index`
    arguments: Any  # that `_fill` reads and writes
    pinned: PinnedBatch | None  # staging buffer of the copy to the device


class HostReplay(ReplayBuffer):
    """Store timesteps in host memory; copy sampled batches to the training device.

    A subclass with other samples than n-step transitions overrides `_empty_batch`, `_arguments` and
    `_fill`.
    """

    _priorities: SumTree | None
    _output: Output | None = None  # of the last sample

    def __init__(
        self, layout: ReplayLayout, *, alpha: float, gamma: float, device: torch.device, seed: int
    ) -> None:
        super().__init__(layout, SumTree(layout.slots, alpha) if layout.prioritized else None, seed)
        ring_size, envs = layout.ring_size, layout.num_envs
        self._frames: NDArray = prefaulted_zeros(
            (ring_size, envs, *layout.frame_shape), layout.dtype
        )
        self._frames_flat = self._frames.reshape(ring_size * envs, layout.frame_size)
        self._action: NDArray[np.int64] = prefaulted_zeros((ring_size, envs), np.int64)
        self._reward: NDArray[np.float32] = prefaulted_zeros((ring_size, envs), np.float32)
        self._gammas = gamma ** np.arange(layout.n_step + 1, dtype=np.float64)
        self._frame_slots = np.zeros((2, layout.frame_stack), np.int64)
        self._device = device
        away = layout.prioritized and device.type != "cpu"
        self._delayed = DelayedPriorities(device) if away else None

    @staticmethod
    def bytes_needed(layout: ReplayLayout) -> int:
        """Return the bytes that a replay of this layout allocates."""
        tree = SumTree.bytes_needed(layout.slots) if layout.prioritized else 0
        scratch = 8 * (layout.n_step + 1) + 16 * layout.frame_stack
        return layout.slots * layout.slot_bytes + Timeline.bytes_needed(layout) + tree + scratch

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
        entry = self.timeline.entry
        newest = 0.0 if self._priorities is None else self._priorities.initial_priority
        _, evicted = self.timeline.advance(terminated, truncated, valid, newest)
        self._action[entry] = action
        self._reward[entry] = reward
        self._frames[self.timeline.entry] = next_obs[:, self._newest :]
        if self._delayed is not None:
            self._delayed.drop(evicted)

    @override
    def sample(self, n: int, *, beta: float = 1.0) -> ReplayBatch:
        if not self.timeline.count:
            raise RuntimeError(NOT_SAMPLEABLE)
        out = self._output
        if out is None or n != len(out.drawn):
            out = self._output = self._make_output(n)
        if out.pinned is not None:
            out.pinned.wait()
        self._random.random(out=out.uniform)
        self._fill(out, beta)
        if out.pinned is not None:
            out.pinned.send()
        batch: ReplayBatch = out.batch
        return batch

    def _fill(self, out: Output, beta: float) -> None:
        """Draw starts by `out.uniform`; write their ids, weights and samples."""
        draw_windows(out.arguments, beta)

    @override
    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        if self._priorities is None:
            return
        out = self._output
        if out is not None and index is out.batch.index:
            drawn = out.drawn
        else:
            drawn = index.numpy(force=True)
        if self._delayed is None:
            self._priorities.update(drawn, td_error.numpy(force=True))
        else:
            self._priorities.update(*self._delayed.swap(drawn, td_error))

    @override
    def clear(self) -> None:
        super().clear()
        if self._delayed is not None:
            self._delayed.clear()

    @override
    def _metadata(self) -> dict[str, Any]:
        delayed = {} if self._delayed is None else {"delayed": self._delayed.state_dict()}
        return super()._metadata() | delayed

    @cached_property
    def ring(self) -> Ring:
        """Arrays that compiled code appends to, between `begin_append` and `end_append`."""
        counters = np.zeros(COUNTERS, np.int64)
        stored = (self._layout.reach, self._frames_flat, self._action, self._reward)
        levels, initial_priority = self._levels, np.zeros(1)
        everything: Any = (*self.timeline.arrays, *stored, *levels, initial_priority, counters)
        return Ring._make(everything)

    def begin_append(self) -> None:
        """Write the pending timestep and the initial priority into the ring's counters."""
        self.ring.counters[:] = self.timeline.timestep, self.timeline.count, 0
        if self._priorities is not None:
            self.ring.initial_priority[0] = self._priorities.initial_priority

    def end_append(self) -> None:
        """Read back the counters after compiled code appended timesteps."""
        self.timeline.timestep, self.timeline.count, wrong = self.ring.counters.tolist()
        self.timeline.raise_if_invalid(wrong)

    @override
    def _stored(self) -> dict[str, Tensor]:
        arrays = {"frames": self._frames, "action": self._action, "reward": self._reward}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _make_output(self, size: int) -> Output:
        batch = given = self._empty_batch(size)
        pinned = None
        if self._device.type != "cpu":
            pinned = PinnedBatch(batch[:-1], self._device)
            batch, given = (
                type(batch)._make([*parts, batch.index]) for parts in (pinned.host, pinned.device)
            )
        batch.weight.fill_(1.0)
        uniform = np.empty(size)
        return Output(given, uniform, batch.index.numpy(), self._arguments(batch, uniform), pinned)

    def _empty_batch(self, size: int) -> Any:
        """Return a batch in host memory, not initialised; its last field is `index`."""
        shape = (size, *self._obs_shape[1:])
        dtype = torch.from_numpy(self._frames[:0]).dtype
        return ReplayBatch(
            obs=torch.empty(shape, dtype=dtype),
            action=torch.empty(size, dtype=torch.int64),
            reward=torch.empty(size),
            discount=torch.empty(size),
            next_obs=torch.empty(shape, dtype=dtype),
            weight=torch.empty(size),
            index=torch.empty(size, dtype=torch.int64),
        )

    def _arguments(self, batch: Any, uniform: NDArray[np.float64]) -> Any:
        """Return what `_fill` reads and writes: the arrays of this batch, which is on the host."""
        stack_shape = (len(uniform), self._layout.frame_stack, self._frames_flat.shape[1])
        filled = {name: tensor.numpy() for name, tensor in batch._asdict().items()}
        frames = [filled.pop(name).reshape(stack_shape) for name in ("obs", "next_obs")]
        drawn, weight = filled.pop("index"), filled.pop("weight")
        _, sampleable, cursors, *_ = self.timeline.arrays
        return box((
            *self._levels, sampleable, cursors, uniform, weight,
            self.timeline.flags, self._frames_flat, self._action, self._reward, self._gammas,
            drawn, self._frame_slots, *frames, *filled.values(),  # of action, reward and discount
        ))  # fmt: skip
