"""Whether an update runs eagerly, as one compiled graph, or as a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from steadyrl.agents.engine.inductor import CompiledGraph
from steadyrl.core.cuda_graph import CudaGraphed

log = logging.getLogger("steadyrl")

Mode = Literal["eager", "compiled", "cudagraph"]

Setting = Literal["false", "true", "cudagraph", "auto"]

# A graph costs 15–30 s of compilation (once on a machine) and saves a few hundred µs an update
# on small networks: below this many updates a run is over sooner without it.
WORTHWHILE_UPDATES = 50_000


def compile_mode(
    setting: Setting, device: torch.device, expected_updates: int, *, large_images: bool = False
) -> Mode:
    """Decide how updates run; a CUDA graph pays from the start because it needs no compiler.

    On the host, the convolutions of large images take all the time and the compiler leaves them
    as they are: it gains nothing there.
    """
    if setting == "cudagraph":
        if device.type == "cuda":
            return "cudagraph"
        log.warning("agent.compile=cudagraph needs a CUDA device: running eagerly on %s", device)
        return "eager"
    if setting == "auto":
        if device.type == "cuda":
            return "cudagraph"
        pays = expected_updates >= WORTHWHILE_UPDATES and not large_images
        return "compiled" if pays else "eager"
    return "compiled" if setting == "true" else "eager"


def compile_for_mode(
    function: Callable[..., Any],
    mode: Mode,
    eager: Callable[..., Any],
    *,
    only_read: Sequence[int] = (),
) -> Callable[..., Any]:
    """Return `function` compiled or recorded, or `eager`, which computes the same."""
    if mode == "eager":
        return eager
    if mode == "cudagraph":
        return CudaGraphed(eager)
    return CompiledGraph(function, eager, only_read=only_read)
