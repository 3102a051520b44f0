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
