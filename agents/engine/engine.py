"""How an update runs: eagerly, as one compiled graph, or as a CUDA graph."""

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

# Compiling takes 15–30 s (once per machine) and saves a few hundred µs per update of a small
# network: runs with fewer updates are faster without it.
WORTHWHILE_UPDATES = 50_000


def compile_mode(
    setting: Setting, device: torch.device, expected_updates: int, *, large_images: bool = False
) -> Mode:
    """Select how updates run. A CUDA graph needs no compiler, so it always pays off.

    On the host, convolutions of large images dominate, and Inductor does not speed them up.
    """
    if setting == "cudagraph":
        if device.type == "cuda":
            return "cudagraph"
        log.warning(
            "agent.compile=cudagraph needs a CUDA device: updates run eagerly on %s", device
        )
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
    """Return `function` compiled, `eager` captured as a CUDA graph, or `eager` itself."""
    if mode == "eager":
        return eager
    if mode == "cudagraph":
        return CudaGraphed(eager)
    return CompiledGraph(function, eager, only_read=only_read)
