"""Linear layers with noisy weights, for exploration (NoisyNet).

Noise is an argument of the forward pass, one vector for all layers. Without it, the weights are
their means.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn
from typing_extensions import override

from steadyrl.agents.learner.comm import Comm
from steadyrl.buffers.memory_layout import to_device

VECTORS = 3  # noise vectors per update: online values, targets, and action selection


class NoisyLinear(nn.Linear):
    """y = (μ + σ ⊙ f(ε) f(ε')ᵀ) x + μ_b + σ_b ⊙ f(ε) (Fortunato et al. 2018, factorised).

    The noise matrix is never built: its factors scale inputs and outputs, so that each sample
    of a batch may have noise of its own.
    """

    def __init__(self, inputs: int, outputs: int, *, sigma: float) -> None:
        super().__init__(inputs, outputs)
        self.weight_sigma = nn.Parameter(torch.empty(outputs, inputs))
        self.bias_sigma = nn.Parameter(torch.empty(outputs))
        self._start = sigma / math.sqrt(inputs)

    @property
    def noise_size(self) -> int:
        """Length of the noise vector."""
        return self.in_features + self.out_features

    @override
    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return y [B, out] for x [B, in] with noise (f(ε'), f(ε)), [in + out] or [B, in + out]."""
        y: Tensor = F.linear(x, self.weight, self.bias)
        if noise is None:
            return y
        entering, leaving = noise.split((self.in_features, self.out_features), -1)
        y = y + leaving * F.linear(entering * x, self.weight_sigma, self.bias_sigma)
        return y

    def reset_sigma(self) -> None:
        """Set all σ to their initial value."""
        nn.init.constant_(self.weight_sigma, self._start)
        nn.init.constant_(self.bias_sigma, self._start)


def noise_sizes(network: nn.Module) -> tuple[int, ...]:
    """Return the noise size of each noisy layer, in the order of their forward passes."""
    return tuple(each.noise_size for each in network.modules() if isinstance(each, NoisyLinear))


def draw_noise(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw f(ε) = sign(ε) √|ε| [count, size], ε ~ N(0, 1)."""
    noise = torch.randn((count, size), generator=generator)
    return noise.abs().sqrt_().copysign_(noise)


def update_seed(seed: int, update: int) -> int:
    """Return the seed of one update's draws, which are the same if the update is repeated."""
    # Spread consecutive update numbers over the 32 bits of a seed (golden ratio).
    return (seed + update * 0x9E3779B1) % 2**32


class UpdateNoise:
    """Noise of each update, a function of its number: the same if an update is repeated.

    So it has no state to save, and all ranks draw the same noise from rank 0's seed.
    """

    def __init__(self, size: int, device: torch.device, seed: int) -> None:
        self._size, self._generator, self._device = size, torch.Generator(), device
        self._seed = torch.tensor(seed, device=device)
        self._first = seed

    def attach_comm(self, comm: Comm) -> None:
        """Collective: take rank 0's seed."""
        comm.broadcast_((self._seed,))
        self._first = int(self._seed)

    def of(self, update: int) -> tuple[Tensor, ...]:
        """Return f(ε) [VECTORS, K] as the loss's only scalar."""
        self._generator.manual_seed(update_seed(self._first, update))
        noise = draw_noise(VECTORS, self._size, self._generator)
        return (to_device(noise.numpy(), self._device),)
