"""Numba compilation with a safe on-disk cache, and calls between compiled functions by address.

Calling by address lets one compiled rollout run any kernel, and one compiled forward pass any
network: nothing is recompiled per environment or network. Importing this module takes 60 MB, and
compiling 40 MB more, so it is imported only where needed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, config, njit, typeof, types  # type: ignore[attr-defined]
from numba.experimental import structref
from numba.extending import intrinsic, is_jitted

from steadyrl.core.clock import doing
from steadyrl.core.errors import SettingError
from steadyrl.core.gates.numba_private import NUMBA, cgutils, guard_cache, listening, pointer_to
from steadyrl.core.private_directories import cache_directory, make_private

settings: Any = config
CONSTANTS = (bool, int, float, str, tuple, np.generic)
COMPILED_BY_NUMBA = {"numpy", "math", "cmath", "numba"}  # not from their source files


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
    if not NUMBA.offers("cache"):  # what cannot be guarded might load outdated code
        return None
    # RuntimeError: Numba found no writable directory. AttributeError: its cache cannot be guarded.
    with suppress(RuntimeError, AttributeError, OSError), _cache_in(place):
        dispatcher: Any = njit(cache=True, **options)(function)
        guard_cache(dispatcher, _dependencies(function))
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


def _dependencies(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return what the machine code depends on: constants, source files, and their dependencies."""
    return tuple(sorted(_named_in(function.__globals__, _names_in(function), set())))


def _names_in(function: Callable[..., Any]) -> set[str]:
    whole = function.__code__
    within = [code for code in whole.co_consts if isinstance(code, CodeType)]  # comprehensions
    return {name for code in (whole, *within) for name in code.co_names}


def _named_in(namespace: Mapping[str, Any], names: set[str], seen: set[str]) -> set[str]:
    """Return what these names stand for; of a module, its attributes with these names too."""
    found = set()
    for name in names & namespace.keys():
        value = namespace[name]
        if isinstance(value, CONSTANTS):
            found.add(f"{name} = {value!r}")
        elif isinstance(value, np.ndarray):
            digest = hashlib.sha256(value.tobytes()).hexdigest()
            found.add(f"{name} = {value.dtype} {value.shape} {digest}")
        elif isinstance(value, ModuleType):
            of_numba = value.__name__.partition(".")[0] in COMPILED_BY_NUMBA
            if not of_numba and value.__name__ not in seen:
                seen.add(value.__name__)
                found |= _file_stamp(value) | _named_in(vars(value), names, seen)
        else:
            found |= _file_stamp(sys.modules.get(getattr(value, "__module__", "")))
            found.update(_dependencies_of(value, seen))
    return found


def _dependencies_of(value: Any, seen: set[str]) -> Iterable[str]:
    """Return what the code of a called function depends on; of one by Numba's own `njit` too."""
    inner = getattr(value, "py_func", None)
    known: Iterable[str] | None = getattr(value, "dependencies", None)
    if known is not None or not isinstance(inner, FunctionType):
        return known or ()
    name = f"{inner.__module__}:{inner.__qualname__}"
    if name in seen:
        return ()
    seen.add(name)
    return _named_in(inner.__globals__, _names_in(inner), seen)


def _file_stamp(module: ModuleType | None) -> set[str]:
    """Return the state of a module's source; nothing for one that has none, as in an archive."""
    file = getattr(module, "__file__", None)
    if file is None or not os.path.exists(file):
        return set()
    status = os.stat(file)
    return {f"{file} {status.st_mtime_ns} {status.st_size}"}


def address_of(function: Callable[..., Any], *arguments: Any) -> int | None:
    """Compile `function` for these argument types; return its address, None if not possible."""
    if not is_jitted(function) or not NUMBA.offers("call"):
        return None
    signature = tuple(typeof(argument) for argument in arguments)
    dispatcher: Any = function
    dispatcher.compile(signature)
    return pointer_to(dispatcher, signature)


def keeps_machine_code(function: Callable[..., Any]) -> bool:
    """Return whether the machine code of `function` is, or will be, kept on disk for later runs."""
    dispatcher: Any = function
    return is_jitted(function) and dispatcher.stats.cache_path is not None


@contextmanager
def compilation_as_phase() -> Iterator[None]:
    """Mark every compilation in this process as a phase (`core/clock.py`)."""
    running = ExitStack()
    depth = 0  # a function's compilation compiles those that it calls

    def begun(dispatcher: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            kept = keeps_machine_code(dispatcher)
            ends = "kept for the next run" if kept else "again in every run"
            running.enter_context(doing(f"compiling machine code ({ends})"))

    def ended() -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            running.close()

    with listening(begun, ended):
        yield


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

    `box` creates it; compiled functions read `boxed.value`. Python code must not replace the boxed
    arrays, only write into them.
    """


structref.define_proxy(Boxed, _BoxedType, ["value"])


@jit
def box(arguments: Any) -> Any:
    """Box arguments of compiled code."""
    return Boxed(arguments)
