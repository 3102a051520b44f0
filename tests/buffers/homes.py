"""Build a replay in either home; the accelerator's runs on the CPU here."""

from __future__ import annotations

import torch
from traffic import Scene

from buffers.block_sums import BlockSums
from buffers.device import DeviceHome
from buffers.home import Home
from buffers.host import HostHome
from buffers.layout import ReplayLayout
from buffers.replay import ReplayBuffer
from buffers.sum_tree import SumTree
from buffers.timeline import Timeline

HOMES = ("host", "device")
CPU = torch.device("cpu")


def make_replay(
    home: str,
    scene: Scene,
    capacity: int,
    n_step: int,
    gamma: float,
    prioritized: bool,
    *,
    alpha: float = 0.6,
    seed: int = 0,
    device: torch.device = CPU,
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
    timeline = Timeline(layout)
    place: Home
    if home == "host":
        tree = SumTree(layout.slots, alpha) if prioritized else None
        place = HostHome(layout, timeline, tree, gamma=gamma, device=device)
    else:
        blocks = BlockSums(layout.slots, alpha, device) if prioritized else None
        place = DeviceHome(layout, timeline, blocks, gamma=gamma, device=device)
    return ReplayBuffer(layout, timeline, place, seed), layout
