"""The replay: a ring of timeline rows, drawn from uniformly or by priority, n steps at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.batch import ReplayBatch
from buffers.block_sums import BlockSums
from buffers.device import DeviceHome
from buffers.home import Home
from buffers.host import HostHome
from buffers.layout import ReplayLayout
from buffers.settings import ReplaySettings
from buffers.sum_tree import SumTree
from buffers.timeline import Timeline
from memory.budget import available_bytes, require
from memory.errors import SettingError

AUTO_SHARE = 0.75  # of the accelerator's free memory; networks and activations need the rest


class ReplayBuffer:
    """Store each observation once; rebuild stacks, n-step returns and successors when drawn."""

    def __init__(self, layout: ReplayLayout, timeline: Timeline, home: Home, seed: int) -> None:
        self._layout, self._timeline, self._home = layout, timeline, home
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._uniform: NDArray[np.float64] = np.empty(1)
        self._stacked = layout.frame_stack > 1
        self._newest = -layout.frame_shape[0]  # where the newest frame begins in a stack
        self._expected = (layout.num_envs, *layout.observation_shape)

    def __len__(self) -> int:
        """Return how many transitions can be drawn now."""
        return self._timeline.count

    @property
    def capacity(self) -> int:
        """Transitions kept at most: what was asked for, in whole rows."""
        return self._layout.span * self._layout.num_envs

    @property
    def nbytes(self) -> int:
        """Bytes held, all included but the batch handed out."""
        return self._timeline.nbytes + self._home.nbytes

    def start(self, obs: NDArray) -> None:
        """Take the first observations [N, *stacked shape]; what was under way is cut off."""
        self._check(obs)
        if self._timeline.row < 0:
            self._timeline.begin()
        else:
            slot = self._timeline.slot
            born, dead = self._timeline.cut()
            self._home.revise(slot, born, dead)
        self._home.put_frame(self._timeline.slot, obs[:, self._newest :])

    def add(
        self,
        action: NDArray,
        reward: NDArray,
        terminated: NDArray,
        truncated: NDArray,
        valid: NDArray,
        next_obs: NDArray,
    ) -> None:
        """Store a row: arrays [N], and next_obs [N, *stacked shape] of which one frame is kept."""
        if next_obs.shape != self._expected:
            self._check(next_obs)
        timeline, home = self._timeline, self._home
        if timeline.row < 0:
            raise RuntimeError("replay: call start() with the first observations before add()")
        slot = timeline.slot
        born, dead = timeline.advance(terminated, truncated, valid)
        home.put_row(slot, action, reward)
        home.put_frame(timeline.slot, next_obs[:, self._newest :] if self._stacked else next_obs)
        home.revise(slot, born, dead)

    def sample(self, n: int, *, beta: float = 1.0) -> ReplayBatch:
        """Draw n transitions, with repetition; the batch is reused by the next call."""
        if not self._timeline.count:
            raise RuntimeError("replay: there is no complete transition to draw yet")
        if len(self._uniform) != n:
            self._uniform = np.empty(n)
        self._random.random(out=self._uniform)
        return self._home.sample(self._uniform, beta)

    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """Set priorities from TD errors [B]; drawn transitions that are gone are left out."""
        self._home.update_priorities(index, td_error)

    def clear(self) -> None:
        """Forget everything; the memory and the generator stay."""
        self._timeline.clear()
        self._home.clear()

    def release(self) -> None:
        """Free all memory; the buffer is not used afterwards."""
        del self._timeline, self._home

    def state_dict(self) -> dict[str, Any]:
        """Return the plain state; tensors share the buffer's memory, only filled rows are in it."""
        return {
            "layout": self._layout.to_plain(),
            "random": self._random.bit_generator.state,
            "timeline": self._timeline.state_dict(),
            "home": self._home.state_dict(self._filled(self._timeline.row)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave to a buffer of the same shape."""
        theirs, ours = state["layout"], self._layout.to_plain()
        wrong = [
            f"{key}={theirs.get(key)} (here {ours[key]})"
            for key in ours
            if theirs.get(key) != ours[key]
        ]
        if wrong:
            raise ValueError(f"replay: saved with another shape: {', '.join(wrong)}")
        self.clear()
        self._timeline.load_state_dict(state["timeline"])
        self._home.load_state_dict(state["home"], self._filled(self._timeline.row))
        self._random.bit_generator.state = state["random"]

    def _filled(self, row: int) -> int:
        return min(row + 1, self._layout.rows)

    def _check(self, obs: NDArray) -> None:
        if obs.shape != self._expected:
            raise ValueError(f"replay: observations {obs.shape} should be {self._expected}")


def build_replay(
    settings: ReplaySettings,
    *,
    frame_shape: tuple[int, ...],
    dtype: str,
    frame_stack: int,
    num_envs: int,
    n_step: int,
    gamma: float,
    device: torch.device,
    seed: int,
) -> ReplayBuffer:
    """Build the replay that the settings ask for; refuse it first if it cannot fit."""
    layout = ReplayLayout(
        capacity=settings.capacity,
        frame_shape=frame_shape,
        dtype=dtype,
        frame_stack=frame_stack,
        num_envs=num_envs,
        n_step=n_step,
        prioritized=settings.prioritized,
    )
    alpha = settings.alpha
    where = choose_home(settings, layout, device)
    home: Home
    if where is None:
        needed = HostHome.bytes_needed(layout)
        require("replay", needed, unit_bytes=needed / settings.capacity)
        timeline = Timeline(layout)
        tree = SumTree(layout.slots, alpha) if layout.prioritized else None
        home = HostHome(layout, timeline, tree, gamma=gamma, device=device)
    else:
        needed = DeviceHome.bytes_needed(layout)
        require("replay", needed, unit_bytes=needed / settings.capacity, device=where)
        timeline = Timeline(layout)
        blocks = BlockSums(layout.slots, alpha, where) if layout.prioritized else None
        home = DeviceHome(layout, timeline, blocks, gamma=gamma, device=where)
    return ReplayBuffer(layout, timeline, home, seed)


def choose_home(
    settings: ReplaySettings, layout: ReplayLayout, device: torch.device
) -> torch.device | None:
    """Return the accelerator that the replay lives on, or None for the host."""
    if settings.device == "cpu":
        return None
    if settings.device == "cuda":
        if device.type != "cuda":
            reason = f"the run trains on {device.type}; set device=cuda too, or use auto"
            raise SettingError("agent.replay.device", "cuda", reason)
        return device
    if device.type != "cuda":
        return None
    needed = DeviceHome.bytes_needed(layout)
    return device if needed <= AUTO_SHARE * available_bytes(device) else None
