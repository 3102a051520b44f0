"""The private names of Numba that are used, and nothing else of Numba that is private."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite.binding import add_symbol  # type: ignore[import-untyped]
from numba import types

from steadyrl.core.errors import describe
from steadyrl.core.files import lock
from steadyrl.core.gates.gate import Feature, Gate
from steadyrl.core.private_directories import OTHERS_WRITE, is_private

TOOLS, CALLS = "numba.core.cgutils", "numba.core.callconv.CPUCallConv"
FILES, CACHE = "numba.core.caching.IndexDataCacheFile", "numba.core.caching.Cache"
EVENTS = "numba.core.event"
COUNTERS = "numba.core.runtime._nrt_python.c_helpers"

LOCK = ".steadyrl-lock"  # beside the machine code

log = logging.getLogger("steadyrl")

NUMBA = Gate(
    "numba",
    {
        # Calls between compiled functions by address: fused rollouts and networks.
        "call": Feature(
            (
                f"{TOOLS}.unpack_tuple",
                f"{TOOLS}.if_unlikely",
                f"{CALLS}.get_function_type",
                f"{CALLS}.call_function",
                f"{CALLS}.return_status_propagate",
                "numba.core.codegen.JITCodeLibrary.get_pointer_to_function",
                "numba.core.funcdesc.FunctionDescriptor.llvm_func_name",
            ),
            "every timestep is taken alone",
        ),
        "products": Feature(
            (
                f"{TOOLS}.alloca_once_value",
                f"{TOOLS}.for_range",
                f"{TOOLS}.for_range_slice",
                f"{TOOLS}.get_or_insert_function",
            ),
            "actions are computed by torch",
        ),
        "prefetch": Feature((f"{TOOLS}.get_item_pointer",), "the replay is sampled more slowly"),
        "cache": Feature(
            (
                f"{FILES}._load_index",
                f"{FILES}._load_data",
                f"{FILES}._save_index",
                f"{FILES}._save_data",
                f"{FILES}._data_path",
                f"{FILES}.load",
            ),
            "machine code is not cached, and compiled again in each process",
        ),
        "early_load": Feature(
            (f"{CACHE}._load_overload", f"{CACHE}._guard_against_spurious_io_errors", COUNTERS),
            "40 MB more for the compiler, which is prepared before cached code is loaded",
        ),
        "events": Feature(
            (f"{EVENTS}.register", f"{EVENTS}.unregister", f"{EVENTS}.Listener"),
            "compilation of machine code is not shown",
        ),
    },
)


class _Tools:
    """numba.core.cgutils, whose functions are looked up while code is generated."""

    def __getattr__(self, name: str) -> Any:
        return NUMBA[f"{TOOLS}.{name}"]


cgutils: Any = _Tools()


def pointer_to(dispatcher: Any, signature: Any) -> int | None:
    """Return the address of what was compiled for these argument types; None if it returns."""
    compiled = dispatcher.overloads[signature]
    if compiled.signature.return_type is not types.none:
        return None
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


@contextmanager
def listening(begun: Callable[[Any], None], ended: Callable[[], None]) -> Iterator[None]:
    """Call `begun(dispatcher)` before a function is compiled, and `ended()` after it."""
    if not NUMBA.offers("events"):
        yield
        return
    listener_class: Any = NUMBA[f"{EVENTS}.Listener"]

    class Listener(listener_class):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            begun(event.data["dispatcher"])

        def on_end(self, event: Any) -> None:
            ended()

    listener = Listener()
    NUMBA[f"{EVENTS}.register"]("numba:compile", listener)
    try:
        yield
    finally:
        NUMBA[f"{EVENTS}.unregister"]("numba:compile", listener)


def guard_cache(dispatcher: Any, dependencies: tuple[str, ...]) -> None:
    """Let a function's cache load only up-to-date files that only this user can write.

    AttributeError, PermissionError: it cannot be guarded, and must not be used.
    """
    cache = dispatcher._cache
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
    kept.load = _with_fallback(kept.load, lambda: None)  # nothing is cached
    kept._save_index = _write_private(kept._save_index, lambda _: index)
    kept._save_data = _write_private(kept._save_data, lambda name, _: kept._data_path(name))
    cache.save_overload = _if_possible(cache.save_overload, place / LOCK)
    if NUMBA.offers("early_load"):
        cache.load_overload = _load_without_compiler(cache)
    cache.load_overload = _of_these_types(cache.load_overload)


def _if_possible(save: Callable[..., None], lock_file: Path) -> Callable[..., None]:
    """Wrap a writer: one process at a time writes, and on a full disk the code is not kept."""

    def saves(*arguments: Any) -> None:
        try:
            handle = os.open(lock_file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                lock(handle, wait=True)
                save(*arguments)
            finally:
                os.close(handle)
        except OSError as error:
            log.debug("machine code is not kept: %s", describe(error))

    return saves


def _of_these_types(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reader: code for other argument types, by a damaged index, counts as missing."""

    def loads(signature: Any, context: Any) -> Any:
        found = load(signature, context)
        return None if found is None or tuple(found.signature.args) != tuple(signature) else found

    return loads


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
            path.chmod(stat.S_IMODE(os.stat(path).st_mode) & ~OTHERS_WRITE)

    return writes


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
    for name, address in NUMBA[COUNTERS].items():
        add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
