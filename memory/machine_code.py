"""Compiled functions that call one another by address, and read numbers where they lie.

So one compiled function serves all environments, and one all networks, however deep: what differs
is data. It need not be compiled anew for each, nor does a cache hold old copies of a user's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import typeof, types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.experimental import structref
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from memory.compiled import compiled


def address_of(function: Callable[..., Any], *arguments: Any) -> int | None:
    """Compile `function` for such arguments; return where its code is, None if it cannot be."""
    if not isinstance(function, Dispatcher):
        return None
    signature = tuple(typeof(argument) for argument in arguments)
    function.compile(signature)
    made: Any = function.overloads[signature]
    if made.signature.return_type is not types.none:
        return None
    address: int = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
    return address


def is_kept(function: Callable[..., Any]) -> bool:
    """Tell whether the next process need not compile `function` again."""
    return isinstance(function, Dispatcher) and function.stats.cache_path is not None


def _declare_call(typing_context: Any, address: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        given = cgutils.unpack_tuple(builder, values[1], len(arguments))
        kind = context.call_conv.get_function_type(types.none, arguments.types)
        function = builder.inttoptr(values[0], kind.as_pointer())
        status, _ = context.call_conv.call_function(
            builder, function, types.none, arguments.types, given
        )
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.none(types.int64, arguments), generate


def _declare_pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


# In compiled code: call(address, (a, b, …)) calls what `address_of(function, a, b, …)` returned.
call: Any = intrinsic(_declare_call)
_pointer: Any = intrinsic(_declare_pointer)


@compiled
def floats_at(address: int, count: int) -> Any:
    """Return the float32 numbers [count] that lie at an address; somebody else keeps them."""
    return carray(_pointer(address), (count,))


@structref.register
class _HeldType(types.StructRef):  # type: ignore[misc]
    """What `Held` is in compiled code."""


class Held(structref.StructRefProxy):  # type: ignore[misc]
    """Arguments that compiled code is handed once: reading fifty arrays at each call takes 20 µs.

    A compiled function makes it, `return Held(arguments)`; others read `held.inside`. What Python
    keeps of them must not be replaced, only written to.
    """


structref.define_proxy(Held, _HeldType, ["inside"])
