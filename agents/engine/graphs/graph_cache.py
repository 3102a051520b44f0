"""Compiled graphs as shared libraries, cached on disk between runs.

A library runs without the compiler in memory (150 MB) and without Python between its kernels.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from steadyrl.agents.engine.graphs import wide_products
from steadyrl.agents.engine.graphs.compile_directory import CHOICE, in_private_directory
from steadyrl.agents.engine.graphs.compiler_memory import compiler_within_memory
from steadyrl.agents.engine.graphs.wide_products import CODE, TEMPLATE, operator
from steadyrl.core.clock import doing
from steadyrl.core.gates.gate import Unsupported
from steadyrl.core.gates.torch_private import COMPILER, RUNNER, TORCH
from steadyrl.core.private_directories import (
    can_execute,
    code_directory,
    is_private,
    make_private,
)


@contextmanager
def lowering_products() -> Iterator[None]:
    """Let the compiler lower our matrix product operator."""
    if not wide_products.faster_here():  # the operator is not used: leave the compiler unchanged
        yield
        return
    TORCH.require("products")
    config, lowerings = TORCH[f"{COMPILER}.config"], TORCH[f"{COMPILER}.lowering.lowerings"]
    from steadyrl.agents.engine.graphs.product_template import lower_product

    lowerings[operator()] = lower_product
    try:
        with config.patch(epilogue_fusion=False):  # a product is a kernel of its own
            yield
    finally:
        del lowerings[operator()]


log = logging.getLogger("steadyrl")

MAX_CACHED = 64  # libraries of 0.1 to 1 MB; least recently used ones are removed

# What a display shows meanwhile.
COMPILING = "compiling the update (kept for the next run)"
COMPILING_AGAIN = "compiling the update (again in every run)"

LOAD_SECONDS = 60  # far more than loading a library takes
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}

COMPILERS = "TORCHINDUCTOR_"  # prefix of the compiler's environment variables


def host_code(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[[Any], Any]:
    """Return the compiled `graph` for inputs like these, from the cache or compiled now.

    Outputs are new tensors; inputs that the graph mutates are mutated.
    """
    TORCH.require_proven("host_code")
    _runner()  # before anything is compiled
    library = code_directory() / f"{fingerprint(graph, inputs)}.so"
    private = make_private(library.parent)
    if private and not can_execute(library.parent):  # after some 15 s the compiler would fail
        raise Unsupported(
            f"{library.parent} is mounted noexec, and so is the temporary directory: updates run "
            "eagerly. Set XDG_CACHE_HOME or TMPDIR to a directory that code can be loaded from"
        )
    if private and is_private(library):
        with suppress(RuntimeError):  # the file is damaged
            run = _load(library)
            _mark_used(library)
            return run
    with doing(COMPILING if private else COMPILING_AGAIN, logged=True):
        built = _compile(graph, inputs)
    if not private:
        log.warning(
            "not caching compiled graphs: %s is not writable, or is writable by other users. "
            "Graphs are compiled again in the next run",
            library.parent,
        )
        return _load(built)
    try:
        _store(built, library)
    except OSError:  # a read-only home, a full disk
        return _load(built)
    return _load(library)


def fingerprint(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> str:
    """Return a key of everything that the compiled code depends on."""
    modules = [part.code for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    forms = [(tuple(each.shape), each.stride(), str(each.dtype)) for each in inputs]
    switches = {k: v for k, v in os.environ.items() if k.startswith(COMPILERS) and k != CHOICE}
    of_machine = (
        torch.__version__,
        torch.get_num_threads(),
        sorted(switches.items()),
        _processor(),
    )
    sources = [path.read_text("utf-8") for path in (CODE, TEMPLATE)]
    parts = (modules, sources, forms, of_machine)
    return sha256(repr(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """Return the processor's features: a home directory may be shared by several machines."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Path:
    for node in graph.graph.nodes:
        node.meta.clear()  # shapes recorded by tracing confuse this compiler
    with (
        compiler_within_memory(),
        in_private_directory(),
        lowering_products(),
        warnings.catch_warnings(),
    ):
        aot_compile = TORCH[f"{COMPILER}.aot_compile"]
        warnings.simplefilter("ignore", FutureWarning)  # in torch itself
        return Path(str(aot_compile(graph, tuple(inputs))))


def _load(library: Path) -> Callable[[Any], Any]:
    """Load a library; raise Unsupported if that would kill this process."""
    killed_by = _try_loading(library)
    if killed_by:
        raise Unsupported(
            f"loading {library} crashes ({signal.Signals(killed_by).name}), updates run eagerly: "
            "the C++ compiler may link libstdc++ statically. Delete the file to compile it again"
        )
    run: Callable[[Any], Any] = _runner()(str(library), 1).run
    return run


def _try_loading(library: Path) -> int:
    """Load a library in a forked process; return the signal that killed it, or 0."""
    if sys.platform != "linux":  # where a process with threads cannot go on after a fork
        return 0
    # The fork must not react to signals: it has this process's handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - CRASHES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
            child = os.fork()
        if not child:
            _load_and_exit(library)
    except OSError:  # no memory for another process
        return 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _load_and_exit(library: Path) -> NoReturn:
    """Load a library without a word, and end this process."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(LOAD_SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _runner()(str(library), 1)
    finally:
        os._exit(0)


def _runner() -> Callable[[str, int], Any]:
    found: Callable[[str, int], Any] = TORCH[RUNNER]
    return found


def _store(built: Path, library: Path) -> None:
    """Copy a library into the cache, atomically."""
    place, name = tempfile.mkstemp(dir=library.parent)
    try:
        with open(place, "wb") as to, built.open("rb") as source:
            shutil.copyfileobj(source, to)
            to.flush()
            os.fsync(to.fileno())
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)
    found = sorted(library.parent.glob("*.so"), key=lambda path: path.stat().st_mtime)
    for path in found[:-MAX_CACHED]:
        path.unlink(missing_ok=True)


def _mark_used(library: Path) -> None:
    with suppress(OSError):
        os.utime(library)
