"""CUDA graphs: capture a function of tensors once, then replay it with one launch per call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steadyrl.core.errors import describe
from steadyrl.core.gates.torch_private import capture_stream, release_pool

log = logging.getLogger("steadyrl")


def host_sees(tensor: Tensor) -> bool:
    """Return whether reading the tensor's values needs no device synchronisation."""
    return tensor.device.type == "cpu"


def flatten(args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors in `args`, one level of tuples deep: a general tree walk costs 10 µs."""
    leaves: list[Tensor] = []
    for arg in args:
        if isinstance(arg, tuple):
            leaves.extend(arg)
        else:
            leaves.append(arg)
    return leaves


def capture(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Capture a function as a CUDA graph; return the replay function and the static outputs.

    Other threads may use the device meanwhile. A failed capture is cleaned up completely.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        # Entered first, because a failed capture does not restore the current stream.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool, capture_stream(), capture_error_mode="thread_local"),
        ):
            outputs = function()
    except BaseException:
        graph.reset()
        _release(pool)
        raise
    return graph.replay, outputs


def _release(pool: Any) -> None:
    """Clean up after a failed capture: end allocation to its pool, free it, reset the generator.

    Otherwise torch would keep allocating into the capture's pool and never free it.
    """
    device = torch.cuda.current_device()
    release_pool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


def on_side_stream(function: Callable[[], Any]) -> Any:
    """Run a function on the capture's stream: warm-up of libraries and autograd."""
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = function()
    torch.cuda.current_stream().wait_stream(stream)
    return result


class CudaGraphed:
    """A function captured as a CUDA graph with static inputs and outputs.

    Arguments are tensors or tuples of tensors of fixed shapes. The captured call's arguments become
    the static inputs and are overwritten by later calls; with `copies_inputs` (tensor arguments
    only) they are cloned instead. The next call overwrites the returned tensors. A function that
    cannot be captured runs eagerly, with one warning.
    """

    WARM_UP = 3

    def __init__(
        self, function: Callable[..., Any], name: str = "the update", *, copies_inputs: bool = False
    ) -> None:
        self._function, self._name, self._copies_inputs = function, name, copies_inputs
        self._calls = 0
        self._not_capturable = False
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Tensor] = []
        self._outputs: Any = None

    def __call__(self, *args: Any) -> Any:
        """Call the function: eagerly during warm-up, then by replaying its graph."""
        if self._replay is None:
            self._calls += 1
            if self._calls <= self.WARM_UP:
                return on_side_stream(lambda: self._function(*args))
            if self._not_capturable or not self._try_capture(args):
                return self._function(*args)
        else:
            inputs = flatten(args)
            for static, tensor in zip(self._inputs, inputs, strict=True):
                if static.shape != tensor.shape:
                    return self._function(*args)
            for static, tensor in zip(self._inputs, inputs, strict=True):
                if static is not tensor and static.data_ptr() != tensor.data_ptr():
                    static.copy_(tensor, non_blocking=True)
        assert self._replay is not None
        self._replay()
        return self._outputs

    def _try_capture(self, args: Any) -> bool:
        """Capture the function without running it; return whether that succeeded."""
        if self._copies_inputs:
            args = tuple(tensor.clone() for tensor in args)
        try:
            self._replay, self._outputs = capture(lambda: self._function(*args))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The first error is the cause; the failure to end the capture follows from it.
            reason = describe(error.__context__ or error)
            log.warning(
                "cannot capture %s as a CUDA graph, running eagerly: %s", self._name, reason
            )
            self._not_capturable = True
            return False
        self._inputs = flatten(args)
        return True
