"""Prefetching for compiled code that reads a replay: sampling is bound by memory latency."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from steadyrl.core.gates.numba_private import NUMBA, cgutils

READ, KEEP, DATA = 0, 3, 1  # arguments of llvm.prefetch: for reading, all cache levels, data


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


# In compiled code: prefetch(array, i) fetches the cache line of array[i] (1-D, no negative i) ahead
# of its use.
prefetch: Any = intrinsic(_declare)
