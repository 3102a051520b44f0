"""Memory of buffers: prefaulted arrays, prefetching, packed copies to a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from steadyrl.core.gates.numba_private import NUMBA, cgutils
from steadyrl.core.jit import Boxed, jit

CACHE_LINE = 64  # bytes
ALIGNMENT = 16  # bytes; of each tensor within a packed buffer
READ, KEEP, DATA = 0, 3, 1  # arguments of llvm.prefetch: for reading, all cache levels, data


def prefaulted_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """Return cache-line aligned zeros whose pages are already mapped: RSS does not grow later."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + CACHE_LINE, np.uint8)
    raw.fill(0)  # `np.zeros` would map the pages during training
    skip = -raw.ctypes.data % CACHE_LINE
    return raw[skip : skip + size].view(kind).reshape(shape)


def _declare(typing_context: Any, array: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not NUMBA.offers("prefetch"):
            return context.get_dummy_value()
        kind = signature.args[0]
        struct = context.make_array(kind)(context, builder, arguments[0])
        address = cgutils.get_item_pointer(
            context, builder, kind, struct, [arguments[1]], wraparound=False
        )
        pointer = builder.bitcast(address, ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], shape)
        builder.call(function, [pointer, number(READ), number(KEEP), number(DATA)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@jit
def box(arrays: Any) -> Any:
    """Box arrays for compiled code: unboxing many arrays at each call would take 20 µs."""
    return Boxed(arrays)


# In compiled code: prefetch(array, i) fetches the cache line of array[i] (1-D, no negative i) ahead
# of its use. Sampling is bound by memory latency.
prefetch: Any = intrinsic(_declare)

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
