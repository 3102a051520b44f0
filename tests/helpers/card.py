"""A fake accelerator: tensors on `meta`, with every launch, copy and synchronisation counted.

`meta` tensors have shapes and a device but no data, so reading a number is detected, and so is a
host tensor among device tensors. Copies to the host are zeros.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
CPU = torch.device("cpu")
# Operations that copy a number to the host, or need one for the shape of their result.
ASKS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}
MADE_WITHOUT_META = {"_fused_adam_"}  # torch has no shapes for it


class Asked(NamedTuple):
    """Counts of device operations."""

    launches: int
    there: int  # host-to-device copies
    back: int  # device-to-host copies
    waits: tuple[str, ...]  # operations that block the host
    made: int  # tensors allocated


class Card(TorchDispatchMode):
    """Count launches, copies and synchronisations while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.alive: dict[int, int] = {}  # bytes of live storages
        self._there = self._back = self._made_count = 0
        self._waits: list[str] = []

    def take(self) -> Asked:
        """Return the counts since the last call."""
        asked = Asked(
            self.launches.total(), self._there, self._back, tuple(self._waits), self._made_count
        )
        self.launches.clear()
        self._there = self._back = self._made_count = 0
        self._waits = []
        return asked

    def record(self, function):
        """Emulate a CUDA graph's capture: synchronisations raise, and a replay is one launch."""
        before = Counter(self.launches), self._there, self._back, self._waits, self._made_count
        self.launches.clear()
        self._there = self._back = self._made_count = 0
        self._waits = []
        outputs = function()
        asked = self.take()
        self.launches, self._there, self._back, self._waits, self._made_count = before
        if asked.waits or asked.there or asked.back:
            raise RuntimeError(f"operation not permitted when stream is capturing: {asked}")
        return self._play, outputs

    def _play(self) -> None:
        self.launches["graph"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # composite operators, which inference mode does not decompose
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        there = [t for t in tensors if t.device.type == "meta"]
        name = func.name().removeprefix("aten::").split(".")[0]
        target = kwargs.get("device")
        if name == "copy_" and tensors[0].device != tensors[1].device:
            return self._copied(args[0], args[1], non_blocking=len(args) > 2 and args[2])
        if name == "_to_copy" and target is not None and torch.device(target) != args[0].device:
            return self._moved(func, args, kwargs)
        if not there:
            out = func(*args, **kwargs)
            if target is not None and torch.device(target).type == "meta":
                self._launched(name, out)
            return out
        here = [t for t in tensors if t.device.type != "meta" and t.dim()]
        assert not here, f"{name} is given tensors of the host and of the device"
        if name in ASKS:
            self._waits.append(name)
            return 0.0
        if name in MADE_WITHOUT_META:
            self.launches[name] += 1
            return None
        out = func(*args, **kwargs)
        if not is_view(func):
            self._launched(name, out)
        return out

    def _launched(self, name, out):
        self.launches[name] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._made(tensor)

    def _made(self, tensor):
        self._made_count += 1
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)

    def _copied(self, to, given, *, non_blocking):
        self._counts(to.device.type, non_blocking)
        if to.device.type == "cpu":
            to.zero_()
        return to

    def _moved(self, func, args, kwargs):
        to = torch.device(kwargs["device"])
        self._counts(to.type, kwargs.get("non_blocking", False))
        given = args[0]
        made = torch.zeros(given.shape, dtype=kwargs.get("dtype") or given.dtype, device=to)
        return made

    def _counts(self, to, non_blocking):
        if to == "cpu":
            self._back += 1
        else:
            self._there += 1
        if not non_blocking:
            self._waits.append(f"copy to {to}")


def is_view(func) -> bool:
    """Return whether an operator returns a view."""
    returns = func._schema.returns
    if not returns:
        return False
    return all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
