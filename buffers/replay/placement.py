"""Decide whether the replay lives on the accelerator or the host, and whether it fits there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.buffers.replay.timeline import ReplayLayout, Timeline
from steadyrl.core.errors import SettingError
from steadyrl.memory.budget import available_bytes, require

AUTO_FRACTION = 0.75  # of the accelerator's free memory; networks and activations need the rest


def require_room(
    layout: ReplayLayout, bytes_needed: Callable[[ReplayLayout], int], device: torch.device | None
) -> None:
    """Raise MemoryBudgetError if the replay does not fit, naming the largest capacity that does."""
    if device is not None:
        require("the replay's bookkeeping", Timeline.bytes_needed(layout))
    smallest = bytes_needed(replace(layout, capacity=1))
    if smallest > available_bytes(device):
        require(f"a replay of one transition with {layout.read_by_one}", smallest, device=device)
    needed = bytes_needed(layout)
    require("replay", needed, unit_bytes=needed / layout.capacity, device=device)


def choose_accelerator(
    settings: ReplaySettings, needed: int, device: torch.device
) -> torch.device | None:
    """Return the accelerator to store the replay on, or None for host memory."""
    if settings.device == "cpu":
        return None
    if settings.device == "cuda":
        if device.type != "cuda":
            reason = f"the run trains on {device.type}; set device=cuda too, or use auto"
            raise SettingError("agent.replay.device", "cuda", reason)
        return device
    if device.type != "cuda":
        return None
    return device if needed <= AUTO_FRACTION * available_bytes(device) else None
