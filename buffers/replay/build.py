"""Build the replay buffer on the configured device, if it fits into memory."""

from __future__ import annotations

from typing import Any

import torch

from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.buffers.replay.device import DeviceReplay
from steadyrl.buffers.replay.host import HostReplay
from steadyrl.buffers.replay.placement import choose_accelerator, require_room
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.buffers.replay.timeline import ReplayLayout


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
    cuda_graph: bool = False,
) -> ReplayBuffer:
    """Build the replay buffer; raise MemoryBudgetError before allocating if it does not fit.

    `cuda_graph`: what is done on an accelerator is replayed as CUDA graphs.
    """
    layout = ReplayLayout(
        capacity=settings.capacity,
        frame_shape=frame_shape,
        dtype=dtype,
        frame_stack=frame_stack,
        num_envs=num_envs,
        n_step=n_step,
        prioritized=settings.prioritized,
    )
    where = choose_accelerator(settings, DeviceReplay.bytes_needed(layout), device)
    common: Any = {"alpha": settings.alpha, "gamma": gamma, "device": device, "seed": seed}
    if where is None:
        require_room(layout, HostReplay.bytes_needed, None)
        return HostReplay(layout, **common)
    require_room(layout, DeviceReplay.bytes_needed, where)
    return DeviceReplay(layout, **common, cuda_graph=cuda_graph)
