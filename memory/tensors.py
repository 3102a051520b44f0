"""Find live tensors, what keeps them alive, and which keep an autograd graph."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import compress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

# Not followed: they lead to the whole interpreter, not to an object's own parts.
_NOT_FOLLOWED = (type, ModuleType, BuiltinFunctionType, str, bytes, int, float, complex)

_COMPILERS = ("numba.", "llvmlite.")  # their compiled functions lead to the whole compiler

CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))

# Exactly these types: torch.compile's tracing tensors have symbolic shapes and no storage.
_TENSORS = frozenset((Tensor, Parameter))

_MAX_NAMED = 5  # entries per kind in a report


class TensorKind(NamedTuple):
    """Tensors of the same shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    has_graph: bool

    def __str__(self) -> str:
        graph = " with their graph" if self.has_graph else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}{graph}"


class LiveTensors(NamedTuple):
    """All live Python tensors; a shared storage counts once in `nbytes`."""

    number: int
    nbytes: int
    kinds: Counter[TensorKind]


def has_graph(tensor: Tensor) -> bool:
    """Return whether the tensor keeps an autograd graph alive."""
    return bool(tensor.requires_grad and not tensor.is_leaf)


def kind_of(tensor: Tensor) -> TensorKind:
    """Return a tensor's kind, without reading its values."""
    return TensorKind(tuple(tensor.shape), tensor.dtype, str(tensor.device), has_graph(tensor))


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's whole storage; 0 if it has none (sparse)."""
    storage = _storage(tensor)
    return 0 if storage is None else storage.nbytes()


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # this kind of tensor has no storage
        return None


def live_tensors(objects: Sequence[Any] | None = None) -> LiveTensors:
    """Count the tensors among `objects` (default: all objects that the collector tracks)."""
    found = select_types(gc.get_objects() if objects is None else objects, _TENSORS)
    storages: dict[int, int] = {}
    for tensor in found:
        storage = _storage(tensor)
        if storage is not None:
            storages[storage.data_ptr()] = storage.nbytes()
    return LiveTensors(len(found), sum(storages.values()), Counter(map(kind_of, found)))


def select_types(objects: Sequence[Any], types: frozenset[type]) -> list[Any]:
    """Return the objects of exactly these types, without a Python loop: there are many."""
    return list(compress(objects, map(types.__contains__, map(type, objects))))


def reachable_tensors(root: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that `root` keeps alive, with its attribute path."""
    return ((path, value) for path, value in reachable(root, name) if _is_tensor(value))


def reachable(
    root: Any, name: str, longest: float = math.inf, most: float = math.inf
) -> Iterator[tuple[str, Any]]:
    """Yield every object that `root` keeps alive, with its attribute path.

    Elements of containers with more than `longest` are left out, and all objects after `most`.
    """
    seen: set[int] = set()
    keep: list[Any] = []  # a freed temporary's id could be taken by the next object
    waiting: list[tuple[str, Any]] = [(name, root)]
    while waiting and len(keep) < most:
        path, value = waiting.pop()
        if id(value) in seen or issubclass(type(value), _NOT_FOLLOWED):
            continue
        if module_of(type(value)).startswith(_COMPILERS):
            continue
        seen.add(id(value))
        keep.append(value)
        yield path, value
        if _is_tensor(value) and value.is_leaf and value.grad is not None:
            waiting.append((f"{path}.grad", value.grad))
        if type(value) in CONTAINERS and len(value) > longest:
            continue
        # Reversed for LIFO order: readable names must be visited before nameless references.
        waiting += reversed(list(_parts(path, value)))


def module_of(kind: type) -> str:
    """Return the name of a type's module; "" for types of C extensions that have none (SWIG's)."""
    return str(getattr(kind, "__module__", ""))


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), Tensor)


def find_tensors_with_graph(**roots: Any) -> list[str]:
    """Describe tensors that keep an autograd graph, with the path from a root if one holds them.

    To be called between updates, when no tensor should.
    """
    reached = (pair for name, root in roots.items() for pair in reachable_tensors(root, name))
    found = [(path, tensor) for path, tensor in reached if has_graph(tensor)]
    elsewhere = live_tensors().kinds - Counter(kind_of(tensor) for _, tensor in found)
    lines = []
    for path, tensor in found[:_MAX_NAMED]:
        # Minus the list of pairs, the local name, and getrefcount's argument.
        size, references = storage_bytes(tensor), sys.getrefcount(tensor) - 3
        lines.append(f"{path}: {kind_of(tensor)}, {size:,} bytes, {references} references")
    if len(found) > _MAX_NAMED:
        lines.append(f"{len(found) - _MAX_NAMED:,} more in {', '.join(roots)}")
    graphs = [pair for pair in elsewhere.most_common() if pair[0].has_graph]
    return lines + [f"{count:,} elsewhere: {kind}" for kind, count in graphs[:_MAX_NAMED]]


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `value` refers to, under readable names if there are any."""
    kind = type(value)  # `isinstance` fails for a weak proxy of what is gone
    if issubclass(kind, FunctionType):
        # Not its globals: they belong to the module.
        yield from ((f"{path}.__closure__", cell) for cell in value.__closure__ or ())
        yield from ((f"{path}.__defaults__", item) for item in value.__defaults__ or ())
        return
    if issubclass(kind, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in list(value.items()))
        return
    if issubclass(kind, list | tuple):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    attributes = attributes_of(value)
    yield from ((f"{path}.{key}", item) for key, item in list(attributes.items()))
    for slot in slot_names(kind):
        yield f"{path}.{slot}", _slot_of(value, slot)
    # Deques, cells, bound methods, generator frames: everything else that the collector sees.
    # Parts yielded above come again and are skipped as already seen.
    yield from ((f"{path}.*", item) for item in gc.get_referents(value) if item is not attributes)


def _slot_of(holder: Any, slot: str) -> Any:
    try:
        return getattr(holder, slot, None)
    except Exception:  # of user code: `__getattr__` is called for a slot that is not set
        return None


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return an object's own attributes; some libraries' objects give something else for them."""
    try:
        found = getattr(holder, "__dict__", None)
    except Exception:  # of user code, or a weak proxy of what is gone
        return {}
    return found if type(found) is dict else {}


def slot_names(kind: type) -> Iterator[str]:
    """Yield the names of all slots of a class and its bases."""
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                yield slot
