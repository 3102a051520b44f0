"""Ask the processor for a cache line before it is needed: draws wait for memory, not for sums."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

READ, KEEP, DATA = 0, 3, 1  # arguments of LLVM's prefetch: not to write, in all caches, not code


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


# In kernels: prefetch(array, place) fetches the line of array[place] (one axis, no wrap-around).
prefetch: Any = intrinsic(_declare)
