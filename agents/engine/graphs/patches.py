"""Convolutions of small boards in graphs: as products of patches, where graphs are quick at those.

For few channels the libraries' convolution does a third of what the processor could. All patches
of a batch side by side are nine times its numbers, so this is for boards and batches that are
small; the patches of a forward pass serve the backward pass too.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from steadyrl.agents.engine.graphs.wide_products import is_supported, product

MOST_BYTES = 16_000_000  # of patches; more of them leave the caches


class Patches:
    """What a graph has of boards [B, C, H, W]: their patches [B · h · w, tall · wide · C]."""

    def __init__(self) -> None:
        self._of: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Any:
        """Return what aten.convolution does, or NotImplemented where it is left to that."""
        if not self._is_supported(x, weight, how):
            return NotImplemented
        patches, (rows, columns) = self._patches(x, weight), _places(x, weight)
        found = product(patches, _patch_major(weight).t())
        found = found if bias is None else found + bias
        return found.view(len(x), rows, columns, len(weight)).permute(0, 3, 1, 2)

    def backward(
        self, grad_output: Tensor, x: Tensor, weight: Tensor, sizes: Any, *how: Any
    ) -> Any:
        """Return what aten.convolution_backward does, where nobody asks for the slope of x."""
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
            # Where a pixel's channels lie side by side, so does each row of a patch.
            there = x.contiguous(memory_format=torch.channels_last)
            size = (len(x), rows, columns, tall, wide * channels)
            row = width * channels
            seen = there.as_strided(size, (height * row, row, channels, row, 1))
            self._of[x] = seen.reshape(-1, tall * wide * channels)
        return self._of[x]


def _places(x: Tensor, weight: Tensor) -> tuple[int, int]:
    return x.shape[2] - weight.shape[2] + 1, x.shape[3] - weight.shape[3] + 1


def _patch_major(weight: Tensor) -> Tensor:
    """Return filters [O, C, tall, wide] as [O, tall · wide · C], as patches are."""
    return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
