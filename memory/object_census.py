"""Count live objects, and describe what has grown between two counts."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from itertools import islice
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from steadyrl.memory.process import readable
from steadyrl.memory.tensors import (
    LiveTensors,
    live_tensors,
    select_types,
    slot_names,
    storage_bytes,
)

_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))
_MIN_ELEMENTS = 16  # smaller containers are not recorded
_MAX_NAMED = 3  # entries per kind in a report
_MIN_BYTES = 100_000  # bytes; smaller containers without a known owner are not reported
_OWN_PACKAGES = (
    "steadyrl.core",
    "steadyrl.memory",
    "tracemalloc",
)  # the watchers' own objects are bounded
# Reported elsewhere: tensors by kind. Counting creates wrappers of storages.
_NAMED_ELSEWHERE = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage")
_IGNORED_PACKAGES = {*sys.stdlib_module_names, *_OWN_PACKAGES, "builtins"}


class Census(NamedTuple):
    """Live objects by type, lengths of larger containers by id, and tensors by kind."""

    types: Counter[str]
    lengths: dict[int, int]
    tensors: LiveTensors


def take_census() -> Census:
    """Count all objects that the garbage collector tracks: about 0.3 s per million."""
    return _count(gc.get_objects())


def growth_report(before: Census) -> list[str]:
    """Describe what has grown since `before`: containers with their owner, tensors, types."""
    gc.collect()  # garbage has not leaked
    objects = gc.get_objects()
    now = _count(objects)
    own = {id(part) for census in (before, now) for part in (*census, census.tensors.kinds)}
    more_tensors = now.tensors.kinds - before.tensors.kinds
    return [
        *_grown_containers(before, objects, own),
        *(f"{count:,} more tensors {kind}" for kind, count in more_tensors.most_common(_MAX_NAMED)),
        *_grown_types(before, now),
    ]


def _count(objects: list[Any]) -> Census:
    types: Counter[str] = Counter()
    for kind, count in Counter(map(type, objects)).items():
        types[f"{kind.__module__}.{kind.__qualname__}"] += count
    containers = select_types(objects, _CONTAINERS)
    sizes = zip(map(id, containers), map(len, containers), strict=True)
    lengths = {key: length for key, length in sizes if length >= _MIN_ELEMENTS}
    return Census(types, lengths, live_tensors(objects))


def _grown_containers(before: Census, objects: list[Any], own: set[int]) -> list[str]:
    found = []
    for item in select_types(objects, _CONTAINERS):
        more = len(item) - before.lengths.get(id(item), 0)
        if more >= _MIN_ELEMENTS and id(item) not in own:
            newest = _newest(item) or [None]  # another thread may have emptied it
            element_bytes = sum(map(_bytes, newest)) / len(newest)
            found.append((more * element_bytes, more, type(newest[0]), item))
    found.sort(key=lambda entry: -entry[0])
    lines: list[str] = []
    for nbytes, more, element, item in found[: 5 * _MAX_NAMED]:
        owner = _owner(item)
        if owner is None and nbytes < _MIN_BYTES:
            continue
        if owner is not None and _package(owner) in _OWN_PACKAGES:
            continue
        name = "a container without a name" if owner is None else owner
        lines.append(
            f"{name}: {type(item).__name__} with {more:,} more elements "
            f"({element.__name__}), about {readable(nbytes)}"
        )
        if len(lines) == _MAX_NAMED:
            break
    return lines


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
                return f"{type(holder).__module__}.{type(holder).__qualname__}.{name}"
    return None


def _holders(container: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the objects that refer to `container`, with their attributes."""
    # Frames (this one too) refer to it as well; keeping them would make a reference cycle.
    referrers = [item for item in gc.get_referrers(container) if type(item) is not FrameType]
    for referrer in referrers:
        if type(referrer) is dict:
            for holder in gc.get_referrers(referrer):
                if type(holder) is not FrameType and _attributes(holder) is referrer:
                    yield holder, referrer
        elif type(referrer) not in _CONTAINERS:
            # Instances may store attributes inline without a dict, or in slots.
            names = [*_attributes(referrer), *slot_names(type(referrer))]
            yield referrer, {name: getattr(referrer, name, None) for name in names}


def _package(name: str) -> str:
    """Return the top-level package of a type's name; within steadyrl, `steadyrl.<folder>`."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "steadyrl" else first


def _attributes(holder: Any) -> dict[str, Any]:
    found = getattr(holder, "__dict__", None)
    return found if type(found) is dict else {}


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
