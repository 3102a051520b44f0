"""The replay in host memory: NumPy arrays shared with torch, read by Numba kernels."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.replay.append import PLACES, Ring
from steadyrl.buffers.replay.buffer import NOTHING_YET, ReplayBatch, ReplayBuffer
from steadyrl.buffers.replay.delayed import LatePriorities
from steadyrl.buffers.replay.index import (
    ENDED,
    TERMINATED,
    VALID,
    ReplayLayout,
    Timeline,
    pick_uniform,
)
from steadyrl.buffers.replay.sum_tree import SumTree, draw_stratified
from steadyrl.buffers.transfer import Parcel, hold, prefetch, touched_zeros
from steadyrl.core.jit import compiled


@compiled
def stack_slots(flags, slot, chosen):  # type: ignore[no-untyped-def]
    """Write the slots of the frames that make the stack at `slot`, oldest first.

    Before the episode's first frame (the row after an invalid one) it is repeated.
    """
    stack = chosen.shape[0]
    envs = flags.shape[1]
    slots = flags.size
    flat = flags.reshape(slots)
    started = False
    for place in range(stack - 1, -1, -1):
        chosen[place] = slot
        before = slot - envs if slot >= envs else slot - envs + slots
        started = started or not flat[before] & VALID
        if not started:
            slot = before


@compiled
def fetch_windows(flags, frames, actions, rewards, index, reach, size):  # type: ignore[no-untyped-def]
    """Ask for the lines that full windows at `index` begin and end with; all arrays flat."""
    slots = flags.size
    for b in range(index.shape[0]):
        start = index[b]
        end = start + reach if start + reach < slots else start + reach - slots
        prefetch(flags, start)
        prefetch(rewards, start)
        prefetch(actions, start)
        prefetch(frames, start * size)
        prefetch(frames, end * size)


@compiled
def read_windows(  # type: ignore[no-untyped-def]
    flags, frames, actions, rewards, gammas, index, chosen, obs, next_obs, action, reward, discount
):
    """Gather B transitions whose n-step windows begin at `index`.

    flags, actions and rewards [rows, N], frames [rows * N, F], gammas [n + 1] powers of γ;
    obs and next_obs [B, stack, F]. R = Σ_{k<m} γ^k r_k, discount = γ^m (1 − terminated), where m
    is n or what is left of the episode.
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
        chosen[0, stack - 1], chosen[1, stack - 1] = start, slot
        if stack > 1:
            stack_slots(flags, start, chosen[0])
            stack_slots(flags, slot, chosen[1])
        for place in range(stack):
            frame, next_frame = chosen[0, place], chosen[1, place]
            for i in range(size):
                obs[b, place, i] = frames[frame, i]
            for i in range(size):
                next_obs[b, place, i] = frames[next_frame, i]


@compiled
def draw_windows(held, beta):  # type: ignore[no-untyped-def]
    """Draw a window for each number in [0, 1), used up, by a tree or all alike; gather them."""
    (
        nodes, minima, offsets, alive, cursors, uniform, weight,
        flags, frames, actions, rewards, gammas, index,
        chosen, obs, next_obs, action, reward, discount,
    ) = held.inside  # fmt: skip
    if len(nodes):
        draw_stratified(nodes, minima, offsets, uniform, beta, uniform, index, weight)
    else:
        pick_uniform(alive, cursors, uniform, index)
    read_windows(
        flags, frames, actions, rewards, gammas, index,
        chosen, obs, next_obs, action, reward, discount,
    )  # fmt: skip


class _Output(NamedTuple):
    """A batch of one size: what is handed out, and what `draw_windows` works on to fill it."""

    batch: ReplayBatch
    uniform: NDArray[np.float64]
    drawn: NDArray[np.int64]
    held: Any
    parcel: Parcel | None  # by which it gets to a device


class HostReplay(ReplayBuffer):
    """Keep the rows on the host and hand batches over to where they are learned from."""

    _priorities: SumTree | None

    def __init__(
        self, layout: ReplayLayout, *, alpha: float, gamma: float, device: torch.device, seed: int
    ) -> None:
        super().__init__(layout, SumTree(layout.slots, alpha) if layout.prioritized else None, seed)
        rows, envs = layout.rows, layout.num_envs
        self._frames: NDArray = touched_zeros((rows, envs, *layout.frame_shape), layout.dtype)
        self._frames_flat = self._frames.reshape(rows * envs, layout.frame_size)
        self._action: NDArray[np.int64] = touched_zeros((rows, envs), np.int64)
        self._reward: NDArray[np.float32] = touched_zeros((rows, envs), np.float32)
        self._gammas = gamma ** np.arange(layout.n_step + 1, dtype=np.float64)
        self._chosen = np.zeros((2, layout.frame_stack), np.int64)
        self._device = device
        away = layout.prioritized and device.type != "cpu"
        self._late = LatePriorities(device) if away else None
        self._output = self._make_output(1)

    @staticmethod
    def bytes_needed(layout: ReplayLayout) -> int:
        """Return the bytes of such a replay, before any is taken."""
        tree = SumTree.bytes_needed(layout.slots) if layout.prioritized else 0
        scratch = 8 * (layout.n_step + 1) + 16 * layout.frame_stack
        return layout.slots * layout.row_bytes + Timeline.bytes_needed(layout) + tree + scratch

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
        slot = self.timeline.slot
        newest = 0.0 if self._priorities is None else self._priorities.newcomers
        _, dead = self.timeline.advance(terminated, truncated, valid, newest)
        self._action[slot] = action
        self._reward[slot] = reward
        self._frames[self.timeline.slot] = next_obs[:, self._newest :]
        if self._late is not None:
            self._late.forget(dead)

    @override
    def sample(self, n: int, *, beta: float = 1.0) -> ReplayBatch:
        if not self.timeline.count:
            raise RuntimeError(NOTHING_YET)
        if n != len(self._output.drawn):
            self._output = self._make_output(n)
        out = self._output
        if out.parcel is not None:
            out.parcel.wait()
        self._random.random(out=out.uniform)
        draw_windows(out.held, beta)
        if out.parcel is not None:
            out.parcel.send()
        return out.batch

    @override
    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        if self._priorities is None:
            return
        mine = self._output
        drawn = mine.drawn if index is mine.batch.index else index.numpy(force=True)
        if self._late is None:
            self._priorities.update(drawn, td_error.numpy(force=True))
        else:
            self._priorities.update(*self._late.swap(drawn, td_error))

    @override
    def clear(self) -> None:
        super().clear()
        if self._late is not None:
            self._late.clear()

    @override
    def _about(self) -> dict[str, Any]:
        late = {} if self._late is None else {"late": self._late.state_dict()}
        return super()._about() | late

    @cached_property
    def ring(self) -> Ring:
        """The arrays that compiled code adds rows to, between `give` and `took`."""
        places = np.zeros(PLACES, np.int64)
        stored = (self._layout.n_step, self._frames_flat, self._action, self._reward)
        levels, newcomers = self._levels, np.zeros(1)
        everything: Any = (*self.timeline.arrays, *stored, *levels, newcomers, places)
        return Ring._make(everything)

    def give(self, ring: Ring) -> None:
        """Say where rows are to be added."""
        ring.places[:] = self.timeline.row, self.timeline.count, 0
        if self._priorities is not None:
            ring.newcomers[0] = self._priorities.newcomers

    def took(self, ring: Ring) -> None:
        """Count the rows that were added."""
        self.timeline.row, self.timeline.count, wrong = ring.places.tolist()
        self.timeline.refuse_wrong(wrong)

    @override
    def _stored(self) -> dict[str, Tensor]:
        arrays = {"frames": self._frames, "action": self._action, "reward": self._reward}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _make_output(self, size: int) -> _Output:
        shape = (size, *self._expected[1:])
        stacked = (size, self._layout.frame_stack, self._frames_flat.shape[1])
        dtype = torch.from_numpy(self._frames[:0]).dtype
        batch = ReplayBatch(
            obs=torch.empty(shape, dtype=dtype),
            action=torch.empty(size, dtype=torch.int64),
            reward=torch.empty(size),
            discount=torch.empty(size),
            next_obs=torch.empty(shape, dtype=dtype),
            weight=torch.empty(size),
            index=torch.empty(size, dtype=torch.int64),
        )
        parcel, given = None, batch
        if self._device.type != "cpu":
            parcel = Parcel(batch[:-1], self._device)
            batch = ReplayBatch._make([*parcel.here, batch.index])
            given = ReplayBatch._make([*parcel.there, batch.index])
        batch.weight.fill_(1.0)
        uniform, filled = np.empty(size), {n: t.numpy() for n, t in batch._asdict().items()}
        frames = [filled.pop(name).reshape(stacked) for name in ("obs", "next_obs")]
        drawn, weight = filled.pop("index"), filled.pop("weight")
        _, alive, cursors, *_ = self.timeline.arrays
        held = hold((
            *self._levels, alive, cursors, uniform, weight,
            self.timeline.flags, self._frames_flat, self._action, self._reward, self._gammas,
            drawn, self._chosen, *frames, *filled.values(),  # of action, reward and discount
        ))  # fmt: skip
        return _Output(given, uniform, drawn, held, parcel)
