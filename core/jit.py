"""Numba compilation with a safe on-disk cache, and calls between compiled functions by address.

Calling by address lets one compiled rollout run any kernel, and one compiled forward pass any
network: nothing is recompiled per environment or network. Importing this module takes 60 MB, and
compiling 40 MB more, so it is imported only where needed.
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
    """Compile `function` with Numba on its first call and cache the machine code on disk.

    If there is no directory that only this user can write to, it is compiled in every process.
    """
    if settings.DISABLE_JIT:  # `call`, `prefetch` and `Boxed` have no Python implementation
        reason = "replay, rollouts and kernels need Numba's compiler: unset it"
        raise SettingError("NUMBA_DISABLE_JIT", settings.DISABLE_JIT, reason)
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    dispatcher: Any = _cached_jit(function, options) or njit(**options)(function)
    dispatcher.dependencies = _dependencies(function)
    found: Callable[..., Any] = dispatcher
    return found


def _cached_jit(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Return the compiled function with an on-disk cache; None if no safe cache is possible."""
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
    # RuntimeError: Numba found no writable directory. AttributeError: this Numba version has other
    # internals than those guarded below, so its cache might load outdated code.
    with suppress(RuntimeError, AttributeError, OSError), _cache_in(place):
        dispatcher: Any = njit(cache=True, **options)(function)
        _guard(dispatcher._cache, _dependencies(function))
        return dispatcher
    return None


def _default_cache_directory(function: Callable[..., Any]) -> Path | None:
    """Return Numba's default cache directory: `__pycache__` beside the function's file."""
    file = Path(function.__code__.co_filename).absolute()
    return file.parent / "__pycache__" if file.exists() else None


@contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """Set Numba's cache directory ("": the default one beside the function's file)."""
    chosen = settings.CACHE_DIR
    settings.CACHE_DIR = folder
    try:
        yield
    finally:
        settings.CACHE_DIR = chosen


def _guard(cache: Any, dependencies: tuple[str, ...]) -> None:
    """Patch a Numba cache to load only up-to-date files that only this user can write.

    AttributeError: this Numba version has other internals.
    """
    kept, place = cache._cache_file, Path(cache.cache_path)
    if not is_private(place):  # created just now with the default mode
        place.chmod(0o700)
        if not is_private(place):
            raise PermissionError(f"{place}: others than this user can write to it")
    index = kept._index_path
    # Numba checks the function's own file only, but the code of functions it calls is inlined.
    kept._source_stamp = (kept._source_stamp, dependencies)
    kept._load_index = _with_fallback(_read_if_private(kept._load_index, lambda: index), dict)
    kept._load_data = _read_if_private(kept._load_data, kept._data_path)
    kept.load = _with_fallback(kept.load, _nothing)
    kept._save_index = _write_private(kept._save_index, lambda _: index)
    kept._save_data = _write_private(kept._save_data, lambda name, _: kept._data_path(name))
    cache.load_overload = _load_without_compiler(cache)


def _read_if_private(read: Callable[..., Any], path_of: Callable[..., str]) -> Callable[..., Any]:
    """Wrap a reader of code files: PermissionError if other users can write the file."""

    def reads(*arguments: Any) -> Any:
        path = Path(path_of(*arguments))
        if path.exists() and not is_private(path):
            raise PermissionError(f"{path}: others than this user can write to it")
        return read(*arguments)

    return reads


def _write_private(write: Callable[..., None], path_of: Callable[..., str]) -> Callable[..., None]:
    """Wrap a writer: remove other users' write permission from the file."""

    def writes(*arguments: Any) -> None:
        write(*arguments)
        path = Path(path_of(*arguments))
        with suppress(OSError):  # then `_read_if_private` rejects it
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS_WRITE)

    return writes


def _nothing() -> None:
    """Return None: nothing is cached."""


def _with_fallback(read: Callable[..., Any], without: Callable[[], Any]) -> Callable[..., Any]:
    """Wrap a reader: an unreadable cache file (truncated, other version) counts as missing."""

    def reads(*arguments: Any) -> Any:
        try:
            return read(*arguments)
        except Exception:  # a corrupt file may raise anything
            return without()

    return reads


def _load_without_compiler(cache: Any) -> Callable[..., Any]:
    """Load cached machine code without initialising Numba's compiler: saves 40 MB.

    The only symbols that cached code needs and that are missing then are the reference counters.
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
    """Return what the machine code depends on: constants, source files, and their dependencies."""
    whole = function.__code__
    within = [code for code in whole.co_consts if isinstance(code, CodeType)]  # comprehensions
    found = set()
    for name in {name for code in (whole, *within) for name in code.co_names}:
        value = function.__globals__.get(name)
        file = getattr(sys.modules.get(getattr(value, "__module__", "")), "__file__", None)
        if isinstance(value, CONSTANTS):
            found.add(f"{name} = {value!r}")
        elif file is not None and os.path.exists(file):  # not inside an archive
            status = os.stat(file)
            found |= {
                f"{file} {status.st_mtime_ns} {status.st_size}",
                *getattr(value, "dependencies", ()),
            }
    return tuple(sorted(found))


def address_of(function: Callable[..., Any], *arguments: Any) -> int | None:
    """Compile `function` for these argument types; return its address, None if not possible."""
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
    """Return whether the machine code of `function` is cached on disk."""
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
    """Return float32 numbers [count] at an address as an array; the caller keeps them alive."""
    return carray(_pointer(address), (count,))


@structref.register
class _BoxedType(types.StructRef):  # type: ignore[misc]
    """Numba type of `Boxed`."""


class Boxed(structref.StructRefProxy):  # type: ignore[misc]
    """Arguments converted for compiled code once: unboxing fifty arrays per call takes 20 µs.

    A compiled function creates it, `return Boxed(arguments)`; others read `boxed.value`. Python
    code must not replace the boxed arrays, only write into them.
    """


structref.define_proxy(Boxed, _BoxedType, ["value"])
