"""What buffers are made of: arrays that are really there, prefetching, sending."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from steadyrl.core.jit import Held, compiled

CACHE_LINE = 64  # bytes
ALIGNMENT = 16  # bytes; views of packed parts need their own
READ, KEEP, DATA = 0, 3, 1  # arguments of LLVM's prefetch: not to write, in all caches, not code


def touched_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """Return zeros that start on a cache line and whose pages exist, so that use adds none."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + CACHE_LINE, np.uint8)
    raw.fill(0)  # `np.zeros` would leave the pages to be mapped during training
    skip = -raw.ctypes.data % CACHE_LINE
    return raw[skip : skip + size].view(kind).reshape(shape)


def _declare(typing_context: Any, array: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        made = context.make_array(kind)(context, builder, arguments[0])
        address = cgutils.get_item_pointer(
            context, builder, kind, made, [arguments[1]], wraparound=False
        )
        pointer = builder.bitcast(address, ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], shape)
        builder.call(function, [pointer, number(READ), number(KEEP), number(DATA)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@compiled
def hold(given: Any) -> Any:
    """Let compiled code read arrays that it is handed once."""
    return Held(given)


# In kernels: prefetch(array, place) asks for the cache line of array[place] (one axis, no
# wrap-around) before it is needed: draws wait for memory, not for sums.
prefetch: Any = intrinsic(_declare)

Places = list[tuple[int, int, torch.dtype, tuple[int, ...]]]  # begin, bytes, type and shape


def _views(packed: Tensor, places: Places) -> list[Tensor]:
    return [packed[at : at + count].view(kind).view(shape) for at, count, kind, shape in places]


def _places(parts: Iterable[tuple[int, torch.dtype, tuple[int, ...]]]) -> tuple[Places, int]:
    """Return where parts of so many bytes lie when packed, and how many bytes that takes."""
    places, size = [], 0
    for nbytes, kind, shape in parts:
        places.append((size, nbytes, kind, shape))
        size += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


class Parcel:
    """Tensors on the host and the same ones on a device, made once, that travel in one copy."""

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        places, size = _places((t.nbytes, t.dtype, tuple(t.shape)) for t in like)
        pins = device.type == "cuda"
        self._here = torch.empty(size, dtype=torch.uint8, pin_memory=pins)
        self._there = torch.empty(size, dtype=torch.uint8, device=device)
        self.here, self.there = _views(self._here, places), _views(self._there, places)
        self._left = torch.cuda.Event() if pins else None  # type: ignore[no-untyped-call]

    def send(self) -> None:
        """Let what is here be there, without waiting."""
        self._there.copy_(self._here, non_blocking=True)
        if self._left is not None:
            self._left.record(torch.cuda.current_stream(self._there.device))

    def wait(self) -> None:
        """Wait until what was sent last may be written over."""
        if self._left is not None:
            self._left.synchronize()


def send(device: torch.device, *arrays: NDArray) -> list[Tensor]:
    """Return arrays as tensors on the device, in one copy that is not waited for.

    Pinned memory comes from torch's cache, which keeps a block back until its copy is done.
    """
    kinds = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    places, size = _places(
        (array.nbytes, kind, array.shape) for array, kind in zip(arrays, kinds, strict=True)
    )
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, array in zip(_views(packed, places), arrays, strict=True):
        np.copyto(part.numpy(), array)
    return _views(packed.to(device, non_blocking=True), places)
