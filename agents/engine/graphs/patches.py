"""Convolutions of small boards in graphs, as matrix products of patches.

For few channels the libraries' convolutions reach a third of the processor's throughput. Patches
take nine times the memory of their boards, so this is for small boards and batches. The patches of
a forward pass are used by its backward pass too.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from steadyrl.agents.engine.graphs.wide_products import is_supported, product
from steadyrl.core.gates.torch_private import BY_TENSOR, TORCH

MOST_BYTES = 16_000_000  # of patches; more do not fit into caches


class Patches:
    """Patches [B · h · w, tall · wide · C] of a graph's boards [B, C, H, W]."""

    def __init__(self) -> None:
        self._of: MutableMapping[Tensor, Tensor] = TORCH[BY_TENSOR]()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Any:
        """Replace aten.convolution, or return NotImplemented where it is faster."""
        if not self._is_supported(x, weight, how):
            return NotImplemented
        patches, (rows, columns) = self._patches(x, weight), _places(x, weight)
        found = product(patches, _patch_major(weight).t())
        found = found if bias is None else found + bias
        return found.view(len(x), rows, columns, len(weight)).permute(0, 3, 1, 2)

    def backward(
        self, grad_output: Tensor, x: Tensor, weight: Tensor, sizes: Any, *how: Any
    ) -> Any:
        """Replace aten.convolution_backward where the gradient of x is not needed."""
        *geometry, (of_x, _, of_bias) = how
        if of_x or not self._is_supported(x, weight, tuple(geometry)):
            return NotImplemented
        filters, channels, tall, wide = weight.shape
        across = grad_output.transpose(0, 1).reshape(filters, -1)  # [O, B · h · w]
        found = product(across, self._patches(x, weight))
        weight_grad = found.view(filters, tall, wide, channels).permute(0, 3, 1, 2).contiguous()
        return None, weight_grad, across.sum(1) if of_bias else None

    def _is_supported(self, x: Tensor, weight: Tensor, how: tuple[Any, ...]) -> bool:
        stride, padding, dilation, transposed, _, groups = how
        if transposed or groups != 1 or any(padding) or {*stride, *dilation} != {1}:
            return False
        rows, columns = _places(x, weight)
        numbers = len(x) * rows * columns * weight[0].numel()
        return numbers * x.itemsize <= MOST_BYTES and is_supported(x, weight)

    def _patches(self, x: Tensor, weight: Tensor) -> Tensor:
        if x not in self._of:
            _, channels, tall, wide = weight.shape
            _, _, height, width = x.shape
            rows, columns = _places(x, weight)
            # In channels-last format each row of a patch is contiguous.
            there = x.contiguous(memory_format=torch.channels_last)
            size = (len(x), rows, columns, tall, wide * channels)
            row = width * channels
            seen = there.as_strided(size, (height * row, row, channels, row, 1))
            self._of[x] = seen.reshape(-1, tall * wide * channels)
        return self._of[x]


def _places(x: Tensor, weight: Tensor) -> tuple[int, int]:
    return x.shape[2] - weight.shape[2] + 1, x.shape[3] - weight.shape[3] + 1


def _patch_major(weight: Tensor) -> Tensor:
    """Return filters [O, C, tall, wide] as [O, tall · wide · C], in the order of patches."""
    return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
