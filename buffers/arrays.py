"""What buffers are made of: arrays that are really there, prefetching, sending."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

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


# In kernels: prefetch(array, place) asks for the cache line of array[place] (one axis, no
# wrap-around) before it is needed: draws wait for memory, not for sums.
prefetch: Any = intrinsic(_declare)


def send(device: torch.device, *arrays: NDArray) -> list[Tensor]:
    """Return arrays as tensors on the device, in one copy that is not waited for.

    Pinned memory comes from torch's cache, which keeps a block back until its copy is done.
    """
    begins, size = [], 0
    for array in arrays:
        begins.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    parts = []
    for begin, array in zip(begins, arrays, strict=True):
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        part = packed[begin : begin + array.nbytes].view(kind).view(array.shape)
        np.copyto(part.numpy(), array)
        parts.append((begin, array.nbytes, kind, array.shape))
    sent = packed.to(device, non_blocking=True)
    return [sent[at : at + count].view(kind).view(shape) for at, count, kind, shape in parts]
