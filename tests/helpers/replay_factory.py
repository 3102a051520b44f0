"""Build a host replay, or a device replay on the CPU or a given device."""

from __future__ import annotations

import torch
from synthetic_envs import EnvConfig

from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.buffers.replay.device import DeviceReplay
from steadyrl.buffers.replay.host import HostReplay
from steadyrl.buffers.replay.timeline import ReplayLayout

REPLAY_KINDS = ("host", "device")
CPU = torch.device("cpu")


def make_replay(
    place: str,
    scene: EnvConfig,
    capacity: int,
    n_step: int,
    gamma: float,
    prioritized: bool,
    *,
    alpha: float = 0.6,
    seed: int = 0,
    device: torch.device = CPU,
    **more: bool,
) -> tuple[ReplayBuffer, ReplayLayout]:
    layout = ReplayLayout(
        capacity=capacity,
        frame_shape=scene.frame_shape,
        dtype=scene.dtype,
        frame_stack=scene.frame_stack,
        num_envs=scene.num_envs,
        n_step=n_step,
        prioritized=prioritized,
    )
    kind = HostReplay if place == "host" else DeviceReplay
    return kind(layout, alpha=alpha, gamma=gamma, device=device, seed=seed, **more), layout
