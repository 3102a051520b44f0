"""Whether an update runs eagerly, as one compiled graph, or as a CUDA graph; and how."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Mode = Literal["eager", "compiled", "cudagraph"]
Setting = Literal["false", "true", "cudagraph", "auto"]

log = logging.getLogger("steadyrl")

# A graph costs 10–20 s of compilation (a few from the cache) and saves a few hundred µs an
# update on small networks: below this many updates a run is over sooner without it.
WORTHWHILE_UPDATES = 50_000


def compile_mode(setting: Setting, device: torch.device, expected_updates: int) -> Mode:
    """Decide how updates run; a CUDA graph pays from the start because it needs no compiler."""
    if setting == "cudagraph":
        if device.type == "cuda":
            return "cudagraph"
        log.warning("agent.compile=cudagraph needs a CUDA device: running eagerly on %s", device)
        return "eager"
    if setting == "auto":
        if device.type == "cuda":
            return "cudagraph"
        return "compiled" if expected_updates >= WORTHWHILE_UPDATES else "eager"
    return "compiled" if setting == "true" else "eager"


class _Compiled:
    """A function that is compiled at its first call, or runs eagerly where that fails."""

    def __init__(self, function: Callable[..., Any], fallback: Callable[..., Any]) -> None:
        self._run = torch.compile(function, fullgraph=True, dynamic=False)
        self._fallback = fallback
        self._ready = False

    def __call__(self, *args: Any) -> Any:
        if self._ready:
            return self._run(*args)
        log.info("compiling the update (from the cache when an earlier run compiled it) ...")
        begin = time.perf_counter()
        try:
            result = self._run(*args)
            log.info("compiled in %.1f s", time.perf_counter() - begin)
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            log.warning("the update cannot be compiled here, running eagerly: %s", reason)
            self._run = self._fallback
            result = self._run(*args)
        self._ready = True
        return result


class _CudaGraph:
    """A function recorded once on static inputs and replayed with one launch per call."""

    WARM_UP = 3

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: Any = None

    def __call__(self, *args: Any) -> Any:
        if self._graph is None:
            self._calls += 1
            if self._calls <= self.WARM_UP:
                return self._warm_up(args)
            self._record(args)
        else:
            for static, tensor in zip(self._inputs, pytree.tree_leaves(args), strict=True):
                if static.data_ptr() != tensor.data_ptr():
                    static.copy_(tensor, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _warm_up(self, args: Any) -> Any:
        # Recording needs libraries and autograd initialised on a side stream.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self._function(*args)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def _record(self, args: Any) -> None:
        self._inputs = pytree.tree_leaves(args)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._function(*args)


def compiled(
    function: Callable[..., Any], mode: Mode, eager: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `function` compiled or recorded; `eager` computes the same without either."""
    return _CudaGraph(eager) if mode == "cudagraph" else _Compiled(function, eager)
