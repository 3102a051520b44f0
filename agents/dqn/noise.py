"""Noise of noisy networks in updates, as an extension of DQN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossScalars
from steadyrl.agents.networks.noisy import draw_noise
from steadyrl.buffers.memory_layout import to_device

VECTORS = 3  # noise vectors per update: online values, targets, and action selection


def update_seed(seed: int, update: int) -> int:
    """Return the seed of one update's draws, which are the same if the update is repeated."""
    # Spread consecutive update numbers over the 32 bits of a seed (golden ratio).
    return (seed + update * 0x9E3779B1) % 2**32


class UpdateNoise(Extension):
    """Give the loss new noise at each update, a function of the update's number.

    So it has no state to save, and all ranks draw the same noise from rank 0's seed.
    """

    _learner: Learner

    def __init__(self, size: int, device: torch.device, seed: int) -> None:
        self._size, self._generator, self._device = size, torch.Generator(), device
        self._seed = seed

    @override
    def attach(self, parts: Any) -> None:
        self._learner = parts.learner

    @override
    def loss_scalars(self) -> LossScalars:
        return self.of(self._learner.updates)

    def of(self, update: int) -> tuple[Tensor, ...]:
        """Return f(ε) [VECTORS, K] as the loss's only scalar."""
        self._generator.manual_seed(update_seed(self._seed, update))
        noise = draw_noise(VECTORS, self._size, self._generator)
        return (to_device(noise.numpy(), self._device),)

    @override
    def attach_comm(self, comm: Comm) -> None:
        shared = torch.tensor(self._seed, device=self._device)
        comm.broadcast_((shared,))
        self._seed = int(shared)
