"""Who grew: a count of live objects, and the difference of two of them in words."""

from __future__ import annotations

import gc
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import islice
from typing import Any, NamedTuple

from memory.tensors import LiveTensors, live_tensors, storage_bytes
from memory.units import readable

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_SMALL = 16  # containers below this many elements are not remembered
_NAMED = 4  # growers to name of each sort


class Census(NamedTuple):
    """Live objects by type, lengths of the larger containers by id, and tensors by kind."""

    types: Counter[str]
    lengths: dict[int, int]
    tensors: LiveTensors


def take_census() -> Census:
    """Count all objects the garbage collector tracks; tens of milliseconds."""
    objects = gc.get_objects()
    types = Counter(map(type, objects))
    lengths = {
        id(item): len(item)
        for item in objects
        if type(item) in _CONTAINERS and len(item) >= _SMALL and item is not objects
    }
    names: Counter[str] = Counter()
    for kind, count in types.items():
        names[f"{kind.__module__}.{kind.__qualname__}"] += count
    return Census(names, lengths, live_tensors(objects))


def growers(before: Census) -> list[str]:
    """Say what has grown since `before`: containers with their owner, tensors, types."""
    now = take_census()
    return [
        *_grown_containers(before, now),
        *_grown_tensors(before.tensors, now.tensors),
        *_grown_types(before, now),
    ]


def _grown_containers(before: Census, now: Census) -> list[str]:
    own = {id(part) for census in (before, now) for part in (*census, census.tensors.kinds)}
    found = []
    for item in gc.get_objects():
        if type(item) not in _CONTAINERS or id(item) in own:
            continue
        more = len(item) - before.lengths.get(id(item), 0)
        if more >= _SMALL:
            found.append((more * _element_bytes(item), more, item))
    found.sort(key=lambda entry: -entry[0])
    lines = []
    for nbytes, more, item in found[:_NAMED]:
        element = type(next(reversed(item) if isinstance(item, list | deque) else iter(item)))
        lines.append(
            f"{_owner(item)}: {type(item).__name__} with {more:,} more elements "
            f"({element.__name__}), about {readable(nbytes)}"
        )
    return lines


def _element_bytes(container: Any) -> float:
    """Estimate the bytes of one element from the newest few, storages of tensors included."""
    values = container.values() if isinstance(container, dict) else container
    newest = reversed(values) if not isinstance(values, set) else iter(values)
    sample = list(islice(newest, 8))
    return sum(_bytes(value) for value in sample) / max(1, len(sample))


def _bytes(value: Any) -> int:
    kind = type(value)
    if issubclass(kind, tuple | list):
        return sys.getsizeof(value) + sum(sys.getsizeof(part) for part in value[:16])
    if kind.__module__ == "torch":
        return storage_bytes(value) + sys.getsizeof(value)
    return sys.getsizeof(value)


def _owner(container: Any) -> str:
    """Return 'Class.attribute' or 'module.name' of whoever refers to a container."""
    for referrer in gc.get_referrers(container):
        if not isinstance(referrer, dict):
            name = _attribute(referrer, container)
            if name:
                return name
            continue
        key = next((k for k, v in referrer.items() if v is container), None)
        if "__name__" in referrer and "__spec__" in referrer:
            return f"{referrer['__name__']}.{key}"
        for holder in gc.get_referrers(referrer):
            if getattr(holder, "__dict__", None) is referrer:
                return f"{type(holder).__name__}.{key}"
    return "a container without a name"


def _attribute(holder: Any, value: Any) -> str | None:
    """Return the attribute of an instance that keeps its attributes inline or in slots."""
    names = [*getattr(type(holder), "__slots__", ()), *getattr(holder, "__dict__", ())]
    for name in names:
        if isinstance(name, str) and getattr(holder, name, None) is value:
            return f"{type(holder).__name__}.{name}"
    return None


def _grown_tensors(before: LiveTensors, now: LiveTensors) -> list[str]:
    more = (now.kinds - before.kinds).most_common(_NAMED)
    return [f"{count:,} more tensors {kind}" for kind, count in more]


def _grown_types(before: Census, now: Census) -> list[str]:
    """Name the packages whose objects became more, and what they are mostly."""
    packages: dict[str, Counter[str]] = {}
    for name, count in (now.types - before.types).items():
        package, _, rest = name.partition(".")
        if package not in ("builtins", "memory"):
            packages.setdefault(package, Counter())[rest.rpartition(".")[2]] += count
    ranked = sorted(packages.items(), key=lambda entry: -entry[1].total())[:_NAMED]
    return [
        f"{kinds.total():,} more objects of {package} "
        f"({', '.join(f'{count:,} {kind}' for kind, count in kinds.most_common(3))})"
        for package, kinds in ranked
        if kinds.total() >= _SMALL
    ]
