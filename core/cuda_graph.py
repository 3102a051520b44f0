"""Functions of tensors that an accelerator records once, and then plays with one launch a call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from steadyrl.core.errors import describe

log = logging.getLogger("steadyrl")


def host_sees(tensor: Tensor) -> bool:
    """Return whether a look at a tensor's numbers is free: a device would have to be waited for."""
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
    """Record what a function launches, without running it; return what plays it, and its result.

    Other threads may use the device meanwhile. A capture that fails leaves nothing behind.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        # Entered first because a capture that fails does not leave its own stream.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
        ):
            outputs = function()
    except BaseException:
        graph.reset()
        _release(pool)
        raise
    return graph.replay, outputs


def _release(pool: Any) -> None:
    """Return the memory of a capture that ended in an error, and the process to what it was.

    Torch would go on to allocate for that capture, and keep all of it for ever.
    """
    device = torch.cuda.current_device()
    found = vars(torch._C)
    end = found.get("_cuda_endAllocateToPool") or found["_cuda_endAllocateCurrentStreamToPool"]
    with suppress(RuntimeError):  # where the error was another, capturing ended well
        end(device, pool)
        found["_cuda_releasePool"](device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


def on_side_stream(function: Callable[[], Any]) -> Any:
    """Run a function on a stream of its own: there libraries and autograd prepare themselves."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = function()
    torch.cuda.current_stream().wait_stream(stream)
    return result


class CudaGraphed:
    """A function recorded on static inputs and played with one launch per call.

    Its arguments are tensors, or tuples of them, of shapes that stay. Those of the call that is
    recorded are written over by later ones, unless it `copies_inputs`, all of which are then
    tensors. What it returns is written over by the next call. What cannot be recorded goes on
    being run, with one warning.
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
        """Compute the function of these tensors."""
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
        """Record the function, which runs nothing; say whether that could be done."""
        if self._copies_inputs:
            args = tuple(tensor.clone() for tensor in args)
        try:
            self._replay, self._outputs = capture(lambda: self._function(*args))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The first error is the reason; that capturing cannot end either follows from it.
            reason = describe(error.__context__ or error)
            log.warning("%s cannot be recorded here, running eagerly: %s", self._name, reason)
            self._not_capturable = True
            return False
        self._inputs = flatten(args)
        return True
