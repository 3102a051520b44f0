"""The private names of torch that are used, and nothing else of torch that is private."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from steadyrl.core.gates.gate import Feature, Gate

# Whether compiled updates equal eager ones is tested with a version before it is named here.
NEWEST = "2.15"

SLOWER_UPDATES = "eager updates take torch's public operations"
EAGER = "updates run eagerly"
KEPT = "what a failed capture of a CUDA graph allocated is kept"
END = "torch._C._cuda_endAllocateToPool"
RELEASE = "torch._C._cuda_releasePool"
CAPTURE_STREAM = "torch.cuda.graph.default_capture_stream"
RUN_BACKWARD = "torch.autograd.Variable._execution_engine.run_backward"
COMPILER = "torch._inductor"
RUNNER = "torch._C._aoti.AOTIModelContainerRunnerCpu"
MODE = "torch.utils._python_dispatch.TorchDispatchMode"
BY_TENSOR = "torch.utils.weak.WeakTensorKeyDictionary"

RECORD_MEMORY = "torch.cuda.memory._record_memory_history"
DUMP_MEMORY = "torch.cuda.memory._dump_snapshot"
OUT_OF_MEMORY = "torch._C._cuda_attach_out_of_memory_observer"

TORCH = Gate(
    "torch",
    {
        "fused_adam": Feature(("torch._fused_adam_",), SLOWER_UPDATES),
        "run_backward": Feature((RUN_BACKWARD,), SLOWER_UPDATES),
        "trace": Feature((MODE, BY_TENSOR), EAGER, NEWEST),
        "host_code": Feature(
            (
                f"{COMPILER}.aot_compile",
                f"{COMPILER}.config",
                f"{COMPILER}.codecache",
                RUNNER,
            ),
            EAGER,
            NEWEST,
        ),
        "device_code": Feature((f"{COMPILER}.compile", f"{COMPILER}.config"), EAGER, NEWEST),
        "products": Feature(
            (
                f"{COMPILER}.lowering.lowerings",
                f"{COMPILER}.codegen.cpp_template.CppTemplate",
                f"{COMPILER}.ir.ExternKernel",
                f"{COMPILER}.ir.FixedLayout",
                f"{COMPILER}.utils.parallel_num_threads",
            ),
            EAGER,
            NEWEST,
        ),
        "release_pool": Feature((END, RELEASE), KEPT),
        "capture_stream": Feature(
            (CAPTURE_STREAM,), "each CUDA graph keeps a cuBLAS workspace of its own"
        ),
        "snapshot": Feature(
            (RECORD_MEMORY, DUMP_MEMORY, OUT_OF_MEMORY),
            "no snapshot of allocations is written when a card's memory ends",
        ),
        "versions": Feature(
            ("torch.Tensor._version",), "the host's copy of the weights is made anew at each action"
        ),
    },
)


def run_backward() -> Callable[..., Any] | None:
    """Return what `Tensor.backward` calls in the end; its checks take 5 % of a small update.

    Arguments: tensors, their gradients, keep the graph, create one, inputs (none: all leaves),
    allow unreachable ones, accumulate.
    """
    return TORCH[RUN_BACKWARD] if TORCH.offers("run_backward") else None


def fused_adam() -> Callable[..., None] | None:
    """Return the operator behind torch.optim.Adam(fused=True).

    Grouping tensors by device and dtype, as the optimiser does, costs more than the step itself.
    """
    return TORCH["torch._fused_adam_"] if TORCH.offers("fused_adam") else None


def release_pool(device: int, pool: Any) -> None:
    """End the allocation to the pool of a failed capture, and free it."""
    if not TORCH.offers("release_pool"):
        return
    with suppress(RuntimeError):  # no allocation was in progress: the capture itself ended cleanly
        TORCH[END](device, pool)
        TORCH[RELEASE](device, pool)


def capture_stream() -> torch.cuda.Stream:
    """Return the stream that torch captures CUDA graphs on, made if it has made none yet.

    Every stream that multiplies matrices gets cuBLAS workspaces, which torch never frees: 68 MB
    each on an H200.
    """
    if not TORCH.offers("capture_stream"):
        return torch.cuda.Stream()
    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    return torch.cuda.graph.default_capture_stream


def versions() -> Callable[[Sequence[Tensor]], tuple[object, ...]]:
    """Return a function of tensors that returns other values whenever one may have changed."""
    if not TORCH.offers("versions"):
        return lambda tensors: (object(),)  # equal to nothing else
    return lambda tensors: tuple(tensor._version for tensor in tensors)


def record_allocations(entries: int, when_full: Callable[..., None] | None = None) -> None:
    """Record a card's newest allocations, with their Python frames; 0: stop.

    `when_full` is called whenever memory has ended, until the end of the process.
    """
    if entries:
        TORCH[RECORD_MEMORY]("all", context="alloc", stacks="python", max_entries=entries)
    else:
        TORCH[RECORD_MEMORY](None)
    if when_full is not None:
        TORCH[OUT_OF_MEMORY](when_full)


def dump_snapshot(path: str) -> None:
    """Write what is allocated and what was recorded, in torch's own format."""
    TORCH[DUMP_MEMORY](path)
