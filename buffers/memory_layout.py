"""Memory of buffers: prefaulted arrays, packed copies to a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

HOST = torch.device("cpu")

CACHE_LINE = 64  # bytes
ALIGNMENT = 16  # bytes; of each tensor within a packed buffer

IS_TERMINATED, IS_TRUNCATED, IS_VALID = 0, 1, 2  # rows of the flags [3, …] of timesteps


def prefaulted_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """Return cache-line aligned zeros whose pages are already mapped: RSS does not grow later."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + CACHE_LINE, np.uint8)
    raw.fill(0)  # `np.zeros` would map the pages during training
    skip = -raw.ctypes.data % CACHE_LINE
    return raw[skip : skip + size].view(kind).reshape(shape)


Packing = list[tuple[int, int, torch.dtype, tuple[int, ...]]]  # offset, bytes, dtype, shape


def _views(packed: Tensor, packing: Packing) -> list[Tensor]:
    return [packed[at : at + count].view(kind).view(shape) for at, count, kind, shape in packing]


def _pack(parts: Iterable[tuple[int, torch.dtype, tuple[int, ...]]]) -> tuple[Packing, int]:
    """Return the packing of tensors of these bytes, dtypes and shapes, and its total bytes."""
    packing, size = [], 0
    for nbytes, kind, shape in parts:
        packing.append((size, nbytes, kind, shape))
        size += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return packing, size


class PinnedBatch:
    """Preallocated tensors in pinned host memory and on a device, transferred in one copy."""

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        packing, size = _pack((t.nbytes, t.dtype, tuple(t.shape)) for t in like)
        pins = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=pins)
        self._device = torch.empty(size, dtype=torch.uint8, device=device)
        self.host, self.device = _views(self._host, packing), _views(self._device, packing)
        self._copied = torch.cuda.Event() if pins else None  # type: ignore[no-untyped-call]

    def send(self) -> None:
        """Start the copy from host to device."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))

    def wait(self) -> None:
        """Wait until the last copy is done and the host tensors may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()


class PackedInputs:
    """Tensors at fixed addresses on a device, filled from host arrays in one asynchronous copy."""

    def __init__(
        self, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        """Allocate tensors of these dtypes and shapes."""
        parts = ((kind.itemsize * math.prod(shape), kind, shape) for kind, shape in kinds)
        self._packing, size = _pack(parts)
        self._packed = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = _views(self._packed, self._packing)

    def send(self, *arrays: NDArray) -> None:
        """Overwrite the tensors once the work queued before has read them."""
        packed = _packed(arrays, self._packing, len(self._packed), self._packed.device)
        self._packed.copy_(packed, non_blocking=True)


def to_device(array: NDArray, device: torch.device) -> Tensor:
    """Return an array as a tensor on the device; on the CPU it shares memory."""
    return torch.from_numpy(array) if device.type == "cpu" else send(device, array)[0]


def all_to_device(device: torch.device, *arrays: NDArray) -> list[Tensor]:
    """Return arrays as tensors on the device, sent in one copy; on the CPU they are views."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return send(device, *arrays)


def send(device: torch.device, *arrays: NDArray) -> list[Tensor]:
    """Return arrays as tensors on the device, transferred in one asynchronous copy."""
    kinds = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    packing, size = _pack(
        (array.nbytes, kind, array.shape) for array, kind in zip(arrays, kinds, strict=True)
    )
    packed = _packed(arrays, packing, size, device)
    return _views(packed.to(device, non_blocking=True), packing)


def _packed(arrays: Sequence[NDArray], packing: Packing, size: int, device: torch.device) -> Tensor:
    """Return arrays in one host tensor, pinned for CUDA.

    torch's pinned-memory cache does not reuse a block before its copy is done.
    """
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, array in zip(_views(packed, packing), arrays, strict=True):
        np.copyto(part.numpy(), array)
    return packed
