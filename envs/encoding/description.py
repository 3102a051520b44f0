"""Spaces as plain JSON values, so that a saved policy needs no environment to describe its own.

What is read may be a stranger's file: kinds, types and sizes are checked before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.errors import describe
from steadyrl.envs.encoding.spaces import parts_of
from steadyrl.envs.settings import ImageAxes

KINDS = (
    *(spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
    *(spaces.Dict, spaces.Tuple),
)
MOST_ELEMENTS = 1 << 22  # of a space, one-hot; larger ones are not described
MOST_LISTED = 10_000  # bounds or sizes that differ, and parts of a Dict or Tuple
DEEPEST = 8
BOX_DTYPES = (
    *("float16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
INT_DTYPES = BOX_DTYPES[4:]
# NumPy's own: an environment that sets others changes the text of its next copy's spaces.
PRINT_OPTIONS: dict[str, Any] = {
    **{"precision": 8, "threshold": 1000, "edgeitems": 3, "linewidth": 75, "suppress": False},
    **{"nanstr": "nan", "infstr": "inf", "sign": "-", "floatmode": "maxprec"},
    **{"formatter": None, "legacy": False},
}


def space_text(space: spaces.Space[Any]) -> str:
    """Return a space as Gymnasium shows it, whatever `np.set_printoptions` was called with."""
    with np.printoptions(**PRINT_OPTIONS):
        return _text(space)


def _text(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = ", ".join(f"{key!r}: {_text(part)}" for key, part in parts_of(space))
        return f"{type(space).__name__}({parts})"
    if isinstance(space, spaces.Box):
        low, high = (_bound_text(bound) for bound in (space.low, space.high))
        return f"{type(space).__name__}({low}, {high}, {space.shape}, {space.dtype})"
    return str(space)


def _bound_text(bound: NDArray[Any]) -> str:
    return str(bound.min() if bound.size and bound.min() == bound.max() else bound)


def describe_spaces(
    observations: spaces.Space[Any], actions: spaces.Space[Any], axes: ImageAxes
) -> dict[str, Any] | None:
    """Describe an environment's spaces and the order of an image's axes.

    None for what cannot be described: spaces that are too large, or of unknown classes.
    """
    try:
        plain = {"observation": _describe(observations), "action": _describe(actions)}
        read_spaces({**plain, "image_axes": axes})
    except ValueError:
        return None
    return {**plain, "image_axes": axes}


def read_spaces(plain: object) -> tuple[spaces.Space[Any], spaces.Space[Any], ImageAxes]:
    """Build the spaces that `describe_spaces` described; ValueError for anything else."""
    if not (isinstance(plain, dict) and plain.keys() == {"observation", "action", "image_axes"}):
        raise ValueError("not an observation space, an action space and image axes")
    axes = plain["image_axes"]
    if axes not in get_args(ImageAxes):
        raise ValueError("unknown image axes")
    return _read(plain["observation"], DEEPEST), _read(plain["action"], DEEPEST), axes


def place_in(space: spaces.Space[Any], element: int) -> str:
    """Return where an element of a flattened observation lies: "'arm': element [2, 0]"."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in parts_of(space):
            size = spaces.flatdim(part)
            if element < size:
                return f"{key!r}: {place_in(part, element)}"
            element -= size
    if not space.shape:
        return "it"
    return f"element {[int(axis) for axis in np.unravel_index(element, space.shape)]}"


def _describe(space: spaces.Space[Any]) -> dict[str, Any]:
    kind = type(space)
    if kind not in KINDS:  # a subclass may mean something else
        raise ValueError(f"{kind.__name__} is not described")
    plain: dict[str, Any] = {"kind": kind.__name__}
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {**plain, "parts": [[key, _describe(part)] for key, part in parts_of(space)]}
    if isinstance(space, spaces.Discrete):
        return {**plain, "n": int(space.n), "start": int(space.start), "dtype": space.dtype.name}
    sizes = list(space.shape or ())
    if isinstance(space, spaces.MultiBinary):
        return {**plain, "n": sizes[0] if isinstance(space.n, int) else sizes}
    plain["shape"] = sizes
    if isinstance(space, spaces.Box):
        low = _bounds(space.low, space.bounded_below)
        return {**plain, "dtype": space.dtype.name, "low": low,
                "high": _bounds(space.high, space.bounded_above)}  # fmt: skip
    if isinstance(space, spaces.MultiDiscrete):
        plain |= {"dtype": space.dtype.name}
        plain |= {"nvec": _listed(space.nvec), "start": _listed(space.start)}
    return plain


def _bounds(bound: NDArray[Any], has: NDArray[np.bool_]) -> Any:
    """Return a bound of all elements, or a list of theirs; None: no bound."""
    values = [value if here else None for value, here in zip(_listed(bound), has.flat, strict=True)]
    same = all(value == values[0] for value in values)
    return values[0] if values and same else values


def _listed(numbers: NDArray[Any]) -> list[Any]:
    if numbers.size > MOST_ELEMENTS:
        raise ValueError("too large")
    listed: list[Any] = np.asarray(numbers).reshape(-1).tolist()
    return listed


def _read(plain: object, depth: int) -> spaces.Space[Any]:
    if not isinstance(plain, dict) or not depth:
        raise ValueError("not a space, or nested too deeply")
    values = dict(plain)
    kind = values.pop("kind", None)
    try:
        if kind in ("Dict", "Tuple"):
            return _read_parts(kind, depth - 1, **values)
        reader = READERS[kind]
        read: spaces.Space[Any] = reader(**values)
    except (KeyError, TypeError, OverflowError, AssertionError) as error:  # also Gymnasium's checks
        raise ValueError(f"no space: {describe(error)}") from None
    return read


def _read_box(shape: Any, dtype: Any, low: Any, high: Any) -> spaces.Box:
    sizes, kind = _shape(shape), _dtype(dtype, BOX_DTYPES)
    (lowest, below), (highest, above) = (
        _read_bounds(given, sizes, kind, endless=endless)
        for given, endless in ((low, -math.inf), (high, math.inf))
    )
    box = spaces.Box(lowest, highest, dtype=kind.type)
    box.bounded_below, box.bounded_above = below, above  # integers have no infinity
    return box


def _read_bounds(
    given: Any, sizes: list[int], kind: np.dtype[Any], *, endless: float
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return a bound of all elements, and which elements have one."""
    values, listed = (given, True) if isinstance(given, list) else ([given], False)
    if listed and not len(values) == math.prod(sizes) <= MOST_LISTED:
        raise ValueError("another number of bounds than elements, or too many")
    whole = {"f": float, "b": bool}.get(kind.kind, int)
    if not all(value is None or type(value) is whole for value in values):
        raise ValueError(f"bounds are not of {kind.name}")
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        endless = int(limits.max if endless > 0 else limits.min)
    has = np.array([value is not None for value in values])
    with np.errstate(over="ignore"):
        numbers = np.array([endless if value is None else value for value in values], kind)
    if not np.isfinite(numbers[has]).all():
        raise ValueError("a bound is not finite")
    if listed:
        return numbers.reshape(sizes), has.reshape(sizes)
    return np.full(sizes, numbers[0]), np.full(sizes, has[0])


def _read_discrete(n: Any, start: Any, dtype: Any) -> spaces.Discrete[Any]:
    kind = _dtype(dtype, INT_DTYPES)
    return spaces.Discrete(_count(n), start=_whole(start), dtype=kind.type)


def _read_multi_discrete(shape: Any, dtype: Any, nvec: Any, start: Any) -> spaces.Space[Any]:
    sizes, kind = _shape(shape), _dtype(dtype, INT_DTYPES)
    for numbers in (nvec, start):
        if not isinstance(numbers, list) or not len(numbers) == math.prod(sizes) <= MOST_LISTED:
            raise ValueError("another number of sizes than elements, or too many")
    _count(sum(map(_count, nvec)))
    starts = np.array([_whole(number) for number in start], kind).reshape(sizes)
    return spaces.MultiDiscrete(np.array(nvec, kind).reshape(sizes), kind.type, start=starts)


def _read_multi_binary(n: Any) -> spaces.MultiBinary:
    return spaces.MultiBinary(_shape(n) if isinstance(n, list) else _count(n))


def _read_parts(kind: str, depth: int, *, parts: Any) -> spaces.Dict | spaces.Tuple:
    if not isinstance(parts, list) or not 0 < len(parts) <= MOST_LISTED:
        raise ValueError("no parts, or too many")
    read: dict[str | int, spaces.Space[Any]] = {}
    elements = 0
    for key, part in parts:
        read[_key(key)] = found = _read(part, depth)
        elements += spaces.flatdim(found)
        _count(elements)
    if len(read) != len(parts):
        raise ValueError("two parts have one name")
    if kind == "Tuple":
        return spaces.Tuple(read.values())
    named: Any = list(read.items())  # in this order; a mapping would be sorted
    return spaces.Dict(named)


def _key(key: Any) -> str | int:
    if type(key) not in (str, int):
        raise ValueError("a part's name is neither text nor a number")
    name: str | int = key
    return name


def _shape(shape: Any) -> list[int]:
    if not isinstance(shape, list) or len(shape) > DEEPEST:
        raise ValueError("no shape")
    sizes = [_count(size) for size in shape]
    _count(math.prod(sizes))
    return sizes


def _count(number: Any) -> int:
    if not 0 < _whole(number) <= MOST_ELEMENTS:
        raise ValueError(f"a size is {number}")
    return int(number)


def _whole(number: Any) -> int:
    if type(number) is not int or not -(2**63) <= number < 2**63:
        raise ValueError("a number is not whole, or too large")
    return number


def _dtype(name: Any, known: tuple[str, ...]) -> np.dtype[Any]:
    if name not in known:
        raise ValueError("unknown dtype")
    kind: np.dtype[Any] = np.dtype(name)
    return kind


READERS: dict[Any, Callable[..., spaces.Space[Any]]] = {
    "Box": _read_box,
    "Discrete": _read_discrete,
    "MultiDiscrete": _read_multi_discrete,
    "MultiBinary": _read_multi_binary,
}
