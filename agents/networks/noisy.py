"""Dense layers whose weights are noisy, so that who decides by them explores (NoisyNet).

Noise is an argument of the pure function that a network is, one vector for all its layers: whoever
calls it says which, and without it the weights are their means.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn
from typing_extensions import override

from steadyrl.agents.learner.comm import Comm
from steadyrl.buffers.memory_layout import send

VECTORS = 3  # of an update: the values learned, their targets, and who chooses the next action


class NoisyLinear(nn.Linear):
    """y = (μ + σ ⊙ f(ε) f(ε')ᵀ) x + μ_b + σ_b ⊙ f(ε) (Fortunato et al. 2018, factorised).

    The matrix of noise is never built: its rows and columns are drawn, so that they can scale what
    comes in and what goes out, for each row of a batch by noise of its own where there is such.
    """

    def __init__(self, inputs: int, outputs: int, *, sigma: float) -> None:
        super().__init__(inputs, outputs)
        self.weight_sigma = nn.Parameter(torch.empty(outputs, inputs))
        self.bias_sigma = nn.Parameter(torch.empty(outputs))
        self._start = sigma / math.sqrt(inputs)

    @property
    def noise_size(self) -> int:
        """Numbers that one draw of the weights takes."""
        return self.in_features + self.out_features

    @override
    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return y [B, out] for x [B, in] by f(ε') and f(ε), [in + out] or [B, in + out]."""
        y: Tensor = F.linear(x, self.weight, self.bias)
        if noise is None:
            return y
        entering, leaving = noise.split((self.in_features, self.out_features), -1)
        y = y + leaving * F.linear(entering * x, self.weight_sigma, self.bias_sigma)
        return y

    def reset_sigma(self) -> None:
        """Set all σ to where they start."""
        nn.init.constant_(self.weight_sigma, self._start)
        nn.init.constant_(self.bias_sigma, self._start)


def noise_sizes(network: nn.Module) -> tuple[int, ...]:
    """Return how many numbers each noisy layer takes, in the order in which they are passed."""
    return tuple(each.noise_size for each in network.modules() if isinstance(each, NoisyLinear))


def draw_noise(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw f(ε) = sign(ε) √|ε| [rows, size], ε ~ N(0, 1)."""
    noise = torch.randn((rows, size), generator=generator)
    return noise.abs().sqrt_().copysign_(noise)


class UpdateNoise:
    """The noise of every update, by its number: the same again for one that is taken again.

    So there is nothing to save, and all ranks have the same once they know rank 0's seed.
    """

    def __init__(self, size: int, device: torch.device, seed: int) -> None:
        self._size, self._generator, self._device = size, torch.Generator(), device
        self._seed = torch.tensor(seed, device=device)
        self._first = seed

    def attach_comm(self, comm: Comm) -> None:
        """Together: draw what rank 0 draws."""
        if self._size:
            comm.broadcast_((self._seed,))
            self._first = int(self._seed)

    def of(self, update: int) -> tuple[Tensor, ...]:
        """Return f(ε) [VECTORS, K] as the learner's one number; none where no layer is noisy."""
        if not self._size:
            return ()
        # Numbers that follow each other make seeds that do not; a generator keeps 32 bits of one.
        self._generator.manual_seed((self._first + update * 0x9E3779B1) % 2**32)
        noise = draw_noise(VECTORS, self._size, self._generator)
        return (noise if self._device.type == "cpu" else send(self._device, noise.numpy())[0],)
