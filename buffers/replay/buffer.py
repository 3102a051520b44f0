"""Replay buffer: a ring of timesteps, sampled as n-step transitions, uniformly or by priority."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.replay.block_sums import BlockSums
from steadyrl.buffers.replay.sum_tree import NO_LEVELS, SumTree, check_leaves
from steadyrl.buffers.replay.timeline import ReplayLayout, Timeline
from steadyrl.core.saved_state import Limits, Saved, check_limits, length, set_numpy_generator
from steadyrl.core.state import Stateful, to_plain

NOT_SAMPLEABLE = "replay: there is no complete transition to draw yet"


class ReplayBatch(NamedTuple):
    """B transitions; the next `sample` overwrites these tensors."""

    obs: Tensor  # [B, *observation_shape]
    action: Tensor  # [B] int64
    reward: Tensor  # [B] n-step return
    discount: Tensor  # [B] γ^m for a window of m steps, 0 where it ends in a termination
    next_obs: Tensor  # [B, *observation_shape]
    weight: Tensor  # [B] importance weights; ones when uniform
    index: Tensor  # type: ignore[assignment]  # [B] int64 transition ids: slots


class ReplayBuffer(Stateful, ABC):
    """Store each frame once; build frame stacks, n-step returns and next observations on sampling.

    `HostReplay` stores in host memory, `DeviceReplay` on the accelerator. Both have the same state
    and sample the same transitions, so a checkpoint of one can be loaded into the other.
    """

    optional_in_checkpoint = True

    _device: torch.device  # that batches are on

    def __init__(
        self, layout: ReplayLayout, priorities: SumTree | BlockSums | None, seed: int
    ) -> None:
        self._levels = priorities.levels if isinstance(priorities, SumTree) else NO_LEVELS
        self._layout, self.timeline = layout, Timeline(layout, self._levels)
        self._priorities = priorities
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._newest = -layout.frame_shape[0]  # where the newest frame begins in a stack
        self._obs_shape = (layout.num_envs, *layout.observation_shape)

    def __len__(self) -> int:
        """Return the number of transitions that can be sampled now."""
        return self.timeline.count

    @property
    def capacity(self) -> int:
        """Largest number of transitions: the configured one, rounded up to a multiple of N."""
        return self._layout.span * self._layout.num_envs

    @property
    def num_envs(self) -> int:
        """Environments whose steps it stores."""
        return self._layout.num_envs

    @property
    def never_empties(self) -> bool:
        """Whether it stays sampleable once it was: a span of 1 empties at each episode's end."""
        return self._layout.span > 1

    @property
    def nbytes(self) -> int:
        """Allocated bytes, without the batch that `sample` returns."""
        priorities = self._priorities.nbytes if self._priorities else 0
        stored = sum(part.nbytes for part in self._stored().values())
        return self.timeline.nbytes + stored + priorities

    @property
    def host_nbytes(self) -> int:
        """Allocated bytes in host memory."""
        return self.nbytes

    def start(self, obs: NDArray) -> None:
        """Store the first observations [N, *stacked shape]; running episodes count as truncated.

        If they are from the middle of an episode, their older frames are stored as timesteps that
        are never sampled, because the frame stacks of later timesteps reach back to them.
        """
        if obs.shape != self._obs_shape:
            raise self._shape_error(obs)
        frames = np.split(obs, self._layout.frame_stack, axis=1)
        if all(np.array_equal(frame, frames[-1]) for frame in frames):  # an episode's first stack
            frames = frames[-1:]
        valid = nothing = np.zeros(self._layout.num_envs, np.bool_)
        for number, frame in enumerate(frames):
            self.add(nothing, nothing, nothing, nothing, valid, self.repeat_frame(frame))
            if not number:
                self.timeline.skip(len(frames) - 1)
                valid = ~nothing

    @abstractmethod
    def add(
        self,
        action: NDArray,
        reward: NDArray,
        terminated: NDArray,
        truncated: NDArray,
        valid: NDArray,
        next_obs: NDArray,
    ) -> None:
        """Store a timestep: arrays [N], and the newest frame of next_obs [N, *stacked shape]."""

    @abstractmethod
    def sample(self, n: int, *, beta: float = 1.0) -> ReplayBatch:
        """Sample n transitions with replacement; the next call overwrites the batch."""

    @abstractmethod
    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """Set priorities from TD errors [B]; transitions evicted since the draw are skipped."""

    def repeat_frame(self, frame: NDArray) -> NDArray:
        """Return observations [N, *stacked shape] that repeat `frame` [N, …] in every position."""
        return np.concatenate([frame] * self._layout.frame_stack, axis=1)

    def start_mid_episode(self, frame: NDArray) -> None:
        """Start from frames [N, …] of running episodes whose older frames are not available."""
        self.start(self.repeat_frame(frame))
        self.timeline.skip(self._layout.frame_stack - 1)

    @property
    def min_probability(self) -> float:
        """Smallest sampling probability of any transition of this rank; its weight is 1."""
        assert self._priorities is not None
        return self._priorities.min_probability

    @property
    def max_priority(self) -> float:
        """Largest p = |δ| + ε seen, by any rank once set; leaves of new transitions get its p^α."""
        assert self._priorities is not None
        return float(self._priorities.max_priority)

    @max_priority.setter
    def max_priority(self, value: float) -> None:
        assert self._priorities is not None
        self._priorities.max_priority = value

    @contextmanager
    def preserve_rng(self) -> Iterator[None]:
        """Restore the random generator afterwards: the next sample repeats those drawn inside."""
        before = self._random.bit_generator.state
        try:
            yield
        finally:
            self._random.bit_generator.state = before

    def check_current(self, actions: int, obs: NDArray | None) -> None:
        """Raise ValueError for stored actions ≥ `actions` or a newest frame other than `obs`'s."""
        stored, count = self._stored(), self._filled()
        if not count:
            raise ValueError("replay: started, but holds no timesteps")
        check_limits(stored["action"][:count], Limits(0, actions - 1))
        if obs is not None:
            newest = stored["frames"][self.timeline.entry].cpu().numpy()
            if not np.array_equal(newest, obs[:, self._newest :].reshape(newest.shape)):
                raise ValueError(
                    "replay: its newest frames differ from the environments' observations"
                )

    def clear(self) -> None:
        """Remove all timesteps; memory stays allocated, the generator keeps its state."""
        self.timeline.clear()  # the arrays need no clearing: only known timesteps are read
        if self._priorities is not None:
            self._priorities.clear()

    def release(self) -> None:
        """Free all memory; the buffer is not used afterwards."""
        vars(self).clear()

    @override
    def state_dict(self) -> dict[str, Any]:
        # Tensors share the buffer's memory: a copy may not fit.
        count = self._filled()
        return {**self._metadata(), **{name: part[:count] for name, part in self._stored().items()}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load_metadata(state)
        count = self._filled()
        for name, part in self._stored().items():
            part[:count].copy_(self._checked_part(state, name, count))

    # Incremental saving during training: metadata, and timesteps by number (counted from the start
    # of the run). A complete timestep never changes.

    @property
    def timestep(self) -> int:
        """Number of the pending timestep, of which only the observation is known; −1: none yet."""
        return self.timeline.timestep

    @property
    def ring_size(self) -> int:
        """Timesteps in the ring; the next one overwrites the oldest."""
        return self._layout.ring_size

    @property
    def timestep_nbytes(self) -> int:
        """Bytes of one timestep of all N environments."""
        return self._layout.slot_bytes * self._layout.num_envs

    def metadata(self) -> dict[str, Any]:
        """Return a copy of the state without the stored timesteps."""
        copied: dict[str, Any] = to_plain(self._metadata())
        return copied

    def load_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Load what `metadata` returned."""
        saved = Saved(metadata, "replay")
        theirs, ours = saved.raw("layout"), self._layout.to_plain()
        if not isinstance(theirs, Mapping):
            raise ValueError("replay: layout is not a mapping")
        wrong = [
            f"{key}={theirs.get(key)} (here {ours[key]})"
            for key in ours
            if theirs.get(key) != ours[key]
        ]
        if wrong:
            raise ValueError(f"replay: saved with another shape: {', '.join(wrong)}")
        self.clear()
        self.timeline.load_state_dict(saved.raw("timeline"))
        if self._priorities is not None:
            leaves = saved.inside("priorities").raw("leaves")
            self._priorities.load_state_dict(saved.raw("priorities"))
            check_leaves(leaves, self.timeline.sampleable_ids)
        set_numpy_generator(self._random, saved.raw("random"))
        if "delayed" in saved and saved.raw("delayed") is not None:
            self._load_delayed(saved.inside("delayed"))

    def _load_delayed(self, delayed: Saved) -> None:
        """Apply saved TD errors whose priorities were not updated yet."""
        index = delayed.raw("index")
        count = length(index)
        index = delayed.tensor("index", (count,), torch.int64, 0, self._layout.slots - 1)
        wide = getattr(delayed.raw("error"), "dtype", None) == torch.float64
        error = delayed.tensor("error", (count,), torch.float64 if wide else torch.float32)
        if count:
            self.update_priorities(index, error.to(self._device))

    def read_timesteps(self, begin: int, end: int) -> dict[str, Tensor]:
        """Return a copy of timesteps begin … end − 1 in host memory, [end − begin, N, …] each."""
        slots = torch.arange(begin, end) % self._layout.ring_size
        return {
            name: part.index_select(0, slots.to(part.device)).to("cpu")
            for name, part in self._stored().items()
        }

    def write_timesteps(self, begin: int, timesteps: Mapping[str, Tensor]) -> None:
        """Write back what `read_timesteps` returned, the first timestep as number `begin`."""
        for name, part in self._stored().items():
            self._checked_part(timesteps, name, len(timesteps[name]))
            slots = torch.arange(begin, begin + len(timesteps[name])) % self._layout.ring_size
            part.index_copy_(0, slots.to(part.device), timesteps[name].to(part.device))

    def _checked_part(self, state: Mapping[str, Any], name: str, count: int) -> Tensor:
        """Return the saved tensor [rows, N, …] after checking its shape and dtype."""
        part = self._stored()[name]
        return Saved(state, "replay").tensor(name, (count, *part.shape[1:]), part.dtype)

    def _metadata(self) -> dict[str, Any]:
        state = {
            "layout": self._layout.to_plain(),
            "random": self._random.bit_generator.state,
            "timeline": self.timeline.state_dict(),
        }
        if self._priorities is not None:
            slots = self._filled() * self._layout.num_envs
            state["priorities"] = self._priorities.state_dict(slots)
        return state

    @abstractmethod
    def _stored(self) -> dict[str, Tensor]:
        """Return the stored tensors by name (frames, action, reward), sharing memory."""

    def _filled(self) -> int:
        return min(self.timeline.timestep + 1, self._layout.ring_size)

    def _shape_error(self, obs: NDArray) -> Exception:
        return ValueError(f"replay: observations {obs.shape} should be {self._obs_shape}")
