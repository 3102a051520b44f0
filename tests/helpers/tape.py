"""CUDA graphs emulated on the host: a function's operations are recorded, undone and replayed.

As on a device, a replay reads and writes the memory of the capture, the capture may not
synchronise, and no Python code runs in a replay.
"""

from __future__ import annotations

import torch
from card import ASKS, is_view
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Every operation with its arguments and results, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._done = []
        self._before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in ASKS or any(isinstance(a, torch.Generator) for a in tree_leaves(kwargs)):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    self._keep(tensor)
        out = func(*args, **kwargs)
        if not is_view(func):
            self._done.append((func, args, kwargs, out))
        return out

    def _keep(self, tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._before:
            self._before[storage.data_ptr()] = storage, storage.clone()

    def undo(self) -> None:
        """Restore the memory: capturing executes nothing."""
        for storage, before in self._before.values():
            storage.copy_(before)

    @torch.inference_mode()
    def play(self) -> None:
        """Replay all operations in the same memory."""
        for func, args, kwargs, out in self._done:
            again = func(*args, **kwargs)
            for there, made in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(there, torch.Tensor) and there.data_ptr() != made.data_ptr():
                    there.copy_(made)


def record(function):
    """Replace `steadyrl.core.cuda_graph.record`."""
    tape = Tape()
    with tape:
        outputs = function()
    tape.undo()
    return tape.play, outputs
