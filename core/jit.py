"""Machine code made of Python functions, which call one another by address.

So one compiled function serves all environments, and one all networks, however deep: what differs
is data. It need not be compiled anew for each, nor does a cache hold old copies of a user's code.
Imported only where it is needed: that takes 60 MB, and making machine code 40 more.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import add_symbol  # type: ignore[import-untyped]
from numba import njit, typeof, types
from numba.core import cgutils
from numba.core import config as numba_config
from numba.core.dispatcher import Dispatcher
from numba.core.runtime._nrt_python import c_helpers as refcount_helpers
from numba.experimental import structref
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from steadyrl.core.errors import SettingError
from steadyrl.core.private_directories import (
    OTHERS_WRITE,
    cache_directory,
    is_private,
    make_private,
)

settings: Any = numba_config
CONSTANTS = (bool, int, float, str, tuple, np.generic)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on its first call; keep the machine code for the next process.

    Where it cannot be kept, or what is kept cannot be trusted, it is compiled once per process.
    """
    if settings.DISABLE_JIT:  # `call`, `prefetch` and `Boxed` are nothing that Python could run
        reason = "replays, rollouts and kernels are machine code that Numba makes: unset it"
        raise SettingError("NUMBA_DISABLE_JIT", settings.DISABLE_JIT, reason)
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    dispatcher: Any = _cached_jit(function, options) or njit(**options)(function)
    dispatcher.dependencies = _dependencies(function)
    found: Callable[..., Any] = dispatcher
    return found


def _cached_jit(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Return `function` with a cache of its machine code; None where there can be none."""
    chosen, beside = settings.CACHE_DIR, _default_cache_directory(function)
    if chosen:
        place, private = chosen, make_private(Path(chosen).absolute())
    else:
        place, private = "", beside is not None and make_private(beside, mode=0o755)
    if not private:
        own = cache_directory() / "numba"
        place, private = str(own), make_private(own)
    if not private:
        return None
    # RuntimeError: Numba found no place that it may write to. AttributeError: this Numba has other
    # parts than those that are guarded, and would load what is out of date.
    with suppress(RuntimeError, AttributeError, OSError), _cache_in(place):
        dispatcher: Any = njit(cache=True, **options)(function)
        _guard(dispatcher._cache, _dependencies(function))
        return dispatcher
    return None


def _default_cache_directory(function: Callable[..., Any]) -> Path | None:
    """Return where Numba keeps machine code by itself: beside the function's file."""
    file = Path(function.__code__.co_filename).absolute()
    return file.parent / "__pycache__" if file.exists() else None


@contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """Let Numba keep machine code below a directory; of none it is beside the function's file."""
    chosen = settings.CACHE_DIR
    settings.CACHE_DIR = folder
    try:
        yield
    finally:
        settings.CACHE_DIR = chosen


def _guard(cache: Any, dependencies: tuple[str, ...]) -> None:
    """Let a cache load what is up to date and this user's; AttributeError if it has other parts."""
    kept, place = cache._cache_file, Path(cache.cache_path)
    if not is_private(place):  # made just now, by what is usual for new directories
        place.chmod(0o700)
        if not is_private(place):
            raise PermissionError(f"{place}: others than this user can write to it")
    index = kept._index_path
    # Numba itself looks at the function's own file only, but what it calls is in there too.
    kept._source_stamp = (kept._source_stamp, dependencies)
    kept._load_index = _with_fallback(_read_if_private(kept._load_index, lambda: index), dict)
    kept._load_data = _read_if_private(kept._load_data, kept._data_path)
    kept.load = _with_fallback(kept.load, _nothing)
    kept._save_index = _write_private(kept._save_index, lambda _: index)
    kept._save_data = _write_private(kept._save_data, lambda name, _: kept._data_path(name))
    cache.load_overload = _load_without_compiler(cache)


def _read_if_private(read: Callable[..., Any], path_of: Callable[..., str]) -> Callable[..., Any]:
    """Read a file, which holds code, only if nobody else can have written it."""

    def reads(*arguments: Any) -> Any:
        path = Path(path_of(*arguments))
        if path.exists() and not is_private(path):
            raise PermissionError(f"{path}: others than this user can write to it")
        return read(*arguments)

    return reads


def _write_private(write: Callable[..., None], path_of: Callable[..., str]) -> Callable[..., None]:
    """Write a file that others cannot write to, whatever new files are by default."""

    def writes(*arguments: Any) -> None:
        write(*arguments)
        path = Path(path_of(*arguments))
        with suppress(OSError):  # then it is not read either
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS_WRITE)

    return writes


def _nothing() -> None:
    """Return what there is where nothing was kept."""


def _with_fallback(read: Callable[..., Any], without: Callable[[], Any]) -> Callable[..., Any]:
    """Let a cache that cannot be read be none: it was cut short, or is of an older program's."""

    def reads(*arguments: Any) -> Any:
        try:
            return read(*arguments)
        except Exception:  # whatever a file may make of its reader
            return without()

    return reads


def _load_without_compiler(cache: Any) -> Callable[..., Any]:
    """Load kept machine code without preparing Numba to make some: 40 MB less.

    All that such code calls by a name that is not there yet is what counts references.
    """
    prepared, kept = cache.load_overload, cache._load_overload
    guard = cache._guard_against_spurious_io_errors

    def load(signature: Any, context: Any) -> Any:
        _register_refcount_symbols()
        with guard():
            found = kept(signature, context)
        return prepared(signature, context) if found is None else found

    return load


@cache
def _register_refcount_symbols() -> None:
    for name, address in refcount_helpers.items():
        add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def _dependencies(function: Callable[..., Any]) -> tuple[str, ...]:
    """Name what else the machine code consists of: constants, functions, and what those are of."""
    whole = function.__code__
    within = [code for code in whole.co_consts if isinstance(code, CodeType)]  # comprehensions
    found = set()
    for name in {name for code in (whole, *within) for name in code.co_names}:
        value = function.__globals__.get(name)
        file = getattr(sys.modules.get(getattr(value, "__module__", "")), "__file__", None)
        if isinstance(value, CONSTANTS):
            found.add(f"{name} = {value!r}")
        elif file is not None and os.path.exists(file):  # not within an archive
            status = os.stat(file)
            found |= {
                f"{file} {status.st_mtime_ns} {status.st_size}",
                *getattr(value, "made_of", ()),
            }
    return tuple(sorted(found))


def address_of(function: Callable[..., Any], *arguments: Any) -> int | None:
    """Compile `function` for such arguments; return where its code is, None if it cannot be."""
    if not isinstance(function, Dispatcher):
        return None
    signature = tuple(typeof(argument) for argument in arguments)
    function.compile(signature)
    dispatcher: Any = function.overloads[signature]
    if dispatcher.signature.return_type is not types.none:
        return None
    address: int = dispatcher.library.get_pointer_to_function(dispatcher.fndesc.llvm_func_name)
    return address


def is_cached(function: Callable[..., Any]) -> bool:
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


@jit
def floats_at(address: int, count: int) -> Any:
    """Return the float32 numbers [count] that lie at an address; somebody else keeps them."""
    return carray(_pointer(address), (count,))


@structref.register
class _BoxedType(types.StructRef):  # type: ignore[misc]
    """What `Boxed` is in compiled code."""


class Boxed(structref.StructRefProxy):  # type: ignore[misc]
    """Arguments that compiled code is handed once: reading fifty arrays at each call takes 20 µs.

    A compiled function makes it, `return Boxed(arguments)`; others read `held.value`. What Python
    keeps of them must not be replaced, only written to.
    """


structref.define_proxy(Boxed, _BoxedType, ["value"])
