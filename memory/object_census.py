"""Count live objects, and describe what has grown between two counts."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FrameType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from steadyrl.memory.process import readable
from steadyrl.memory.tensors import (
    CONTAINERS,
    LiveTensors,
    attributes_of,
    live_tensors,
    module_of,
    reachable,
    select_types,
    slot_names,
    storage_bytes,
)

_MIN_ELEMENTS = 16  # smaller containers are not recorded
_MIN_HELD = 4_000  # bytes; smaller arrays are not recorded
_MAX_NAMED = 3  # entries per kind in a report
_LEAST_FRACTION = 1e-3  # of the largest growth: what grew by less explains nothing
_MIN_BYTES = 100_000  # bytes; smaller containers without a known owner are not reported
# The walk from agent, environment and callbacks: about 10 µs an object.
_LONGEST = 1000  # elements; longer containers are counted, not followed
_MOST_OBJECTS = 100_000
_NO_HOLDERS: Mapping[str, Any] = MappingProxyType({})
_OWN_PACKAGES = ("steadyrl.core", "steadyrl.memory", "tracemalloc")  # whose objects are bounded
# Reported elsewhere: tensors by kind. Counting creates wrappers of storages.
_NAMED_ELSEWHERE = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage")
_IGNORED_PACKAGES = {*sys.stdlib_module_names, *_OWN_PACKAGES, "builtins"}


class Census(NamedTuple):
    """Live objects by type, lengths of larger containers by id, and tensors by kind.

    `held`: bytes, by path, of what Python's collector does not see.
    """

    types: Counter[str]
    lengths: dict[int, int]
    tensors: LiveTensors
    held: dict[str, int]


def take_census(holders: Mapping[str, Any] = _NO_HOLDERS) -> Census:
    """Count all objects that the garbage collector tracks: about 0.3 s per million.

    Of others (NumPy arrays, dicts of plain numbers), those that the named `holders` keep alive.
    """
    return _count(gc.get_objects(), holders)


def growth_report(before: Census, holders: Mapping[str, Any] = _NO_HOLDERS) -> list[str]:
    """Describe what has grown since `before`: containers with their owner, tensors, types."""
    gc.collect()  # garbage has not leaked
    objects = gc.get_objects()
    now = _count(objects, holders)
    own = {id(part) for census in (before, now) for part in (*census, census.tensors.kinds)}
    more_tensors = now.tensors.kinds - before.tensors.kinds
    return [
        *_grown_containers(before, objects, own, holders),
        *_grown_untracked(before, now),
        *(f"{count:,} more tensors {kind}" for kind, count in more_tensors.most_common(_MAX_NAMED)),
        *_grown_types(before, now),
    ]


def _walk(holders: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, root in holders.items():
        yield from reachable(root, name, _LONGEST, _MOST_OBJECTS)


def _untracked(holders: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of arrays and dicts that the collector does not track, by path and kind."""
    held = {}
    for path, value in _walk(holders):
        # Not `isinstance`, which fails for a weak proxy of what is gone.
        if issubclass(type(value), np.ndarray) and value.base is None:
            held[f"{path}: array of {value.dtype}"] = value.nbytes
        elif type(value) in CONTAINERS and not gc.is_tracked(value):
            held[f"{path}: {type(value).__name__} of plain values"] = _container_bytes(value)
    return {name: nbytes for name, nbytes in held.items() if nbytes >= _MIN_HELD}


def _container_bytes(container: Any) -> int:
    newest = _newest(container)
    each = sum(map(sys.getsizeof, newest)) / max(len(newest), 1)
    keys = each if isinstance(container, dict) else 0
    return sys.getsizeof(container) + int(len(container) * (each + keys))


def _grown_untracked(before: Census, now: Census) -> list[str]:
    more = {name: nbytes - before.held.get(name, 0) for name, nbytes in now.held.items()}
    ranked = sorted(more.items(), key=lambda entry: -entry[1])[:_MAX_NAMED]
    return [
        f"{name}, about {readable(nbytes)} more" for name, nbytes in ranked if nbytes >= _MIN_BYTES
    ]


def _count(objects: list[Any], holders: Mapping[str, Any]) -> Census:
    types: Counter[str] = Counter()
    for kind, count in Counter(map(type, objects)).items():
        types[f"{module_of(kind)}.{kind.__qualname__}"] += count
    containers = select_types(objects, CONTAINERS)
    sizes = zip(map(id, containers), map(len, containers), strict=True)
    lengths = {key: length for key, length in sizes if length >= _MIN_ELEMENTS}
    return Census(types, lengths, live_tensors(objects), _untracked(holders))


def _grown_containers(
    before: Census, objects: list[Any], own: set[int], holders: Mapping[str, Any]
) -> list[str]:
    found = []
    for item in select_types(objects, CONTAINERS):
        more = len(item) - before.lengths.get(id(item), 0)
        if more >= _MIN_ELEMENTS and id(item) not in own:
            newest = _newest(item) or [None]  # another thread may have emptied it
            element_bytes = sum(map(_bytes, newest)) / len(newest)
            found.append((more * element_bytes, more, type(newest[0]), item))
    found.sort(key=lambda entry: -entry[0])
    least = _LEAST_FRACTION * found[0][0] if found else 0.0
    found = [entry for entry in found[: 5 * _MAX_NAMED] if entry[0] >= least]
    lines: list[str] = []
    paths = _paths([item for *_, item in found], holders) if found else {}
    for nbytes, more, element, item in found:
        owner = _owner(item)
        if owner is None and nbytes < _MIN_BYTES:
            continue
        if owner is not None and _package(owner) in _OWN_PACKAGES:
            continue
        name = "a container without a name" if owner is None else owner
        lines.append(
            f"{name}: {type(item).__name__} with {more:,} more elements "
            f"({element.__name__}), about {readable(nbytes)}{paths.get(id(item), '')}"
        )
        if len(lines) == _MAX_NAMED:
            break
    return lines


def _paths(items: list[Any], holders: Mapping[str, Any]) -> dict[int, str]:
    """Return where `holders` keep these objects, by id; without those that they do not keep."""
    wanted = set(map(id, items))
    return {id(value): f", at {path}" for path, value in _walk(holders) if id(value) in wanted}


def _newest(container: Any) -> list[Any]:
    """Return the last few elements (of a dict: values)."""
    values = container.values() if isinstance(container, dict) else container
    return list(islice(values if isinstance(values, set) else reversed(values), 8))


def _bytes(value: Any) -> int:
    """Estimate the bytes of an element, including tensor storages."""
    if type(value) in (tuple, list):
        return sys.getsizeof(value) + sum(sys.getsizeof(part) for part in value[:16])
    if issubclass(type(value), Tensor):
        return storage_bytes(value) + sys.getsizeof(value)
    return sys.getsizeof(value)


def _owner(container: Any) -> str | None:
    """Return 'module.Class.attribute' or 'module.name' that refers to a container."""
    for holder, attributes in _holders(container):
        for name, value in list(attributes.items()):
            if value is container:
                if isinstance(holder, ModuleType):
                    return f"{holder.__name__}.{name}"
                return f"{module_of(type(holder))}.{type(holder).__qualname__}.{name}"
    return None


def _holders(container: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the objects that refer to `container`, with their attributes."""
    # Frames (this one too) refer to it as well; keeping them would make a reference cycle.
    referrers = [item for item in gc.get_referrers(container) if type(item) is not FrameType]
    for referrer in referrers:
        if type(referrer) is dict:
            for holder in gc.get_referrers(referrer):
                if type(holder) is not FrameType and attributes_of(holder) is referrer:
                    yield holder, referrer
        elif type(referrer) not in CONTAINERS:
            # Instances may store attributes inline without a dict, or in slots.
            names = [*attributes_of(referrer), *slot_names(type(referrer))]
            yield referrer, {name: getattr(referrer, name, None) for name in names}


def _package(name: str) -> str:
    """Return the top-level package of a type's name; within steadyrl, `steadyrl.<folder>`."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "steadyrl" else first


def _grown_types(before: Census, now: Census) -> list[str]:
    """Describe packages with more objects than before, with their most frequent types."""
    packages: dict[str, Counter[str]] = {}
    for name, count in (now.types - before.types).items():
        package = _package(name)
        if package not in _IGNORED_PACKAGES and name not in _NAMED_ELSEWHERE:
            packages.setdefault(package, Counter())[name.rpartition(".")[2]] += count
    ranked = sorted(packages.items(), key=lambda entry: -entry[1].total())[:_MAX_NAMED]
    return [
        f"{kinds.total():,} more objects of {package} "
        f"({', '.join(f'{count:,} {kind}' for kind, count in kinds.most_common(3))})"
        for package, kinds in ranked
        if kinds.total() > _MAX_NAMED
    ]


def grown_source_lines(before: tracemalloc.Snapshot) -> list[str]:
    """Return the source lines whose allocations have grown since `before` (tracemalloc)."""
    now = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(False, tracemalloc.__file__)]
    )
    return [
        f"{line.traceback[0].filename}:{line.traceback[0].lineno} +{readable(line.size_diff)}"
        for line in now.compare_to(before, "lineno")[:4]
        if line.size_diff > 0
    ]
