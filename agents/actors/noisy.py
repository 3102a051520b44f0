"""Greedy actions of noisy networks (Fortunato et al. 2018), with new noise at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.networks.noisy import draw_noise
from steadyrl.buffers.memory_layout import all_to_device

if TYPE_CHECKING:
    from steadyrl.agents.actors.greedy import GreedyActor


class NoisyNetActor(Actor):
    """Take the greedy action of noisy weights, drawn per timestep and environment."""

    state_names = ("_generator",)

    def __init__(self, greedy: GreedyActor, *, noise_size: int, seed: int) -> None:
        self._greedy, self._noise_size = greedy, noise_size
        self._generator = torch.Generator().manual_seed(seed)

    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Return greedy actions under noisy weights for observations [N, …]."""
        drawn = draw_noise(len(obs), self._noise_size, self._generator)
        observed, noise = all_to_device(self._greedy.device, obs, drawn.numpy())
        with torch.inference_mode():
            return Decision(observed, self._greedy.decide(observed, noise).cpu())
