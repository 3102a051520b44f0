"""Images of any whole or real numbers become bytes from 0 to 255, channels first."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.types import Encoder

LEVELS = 256
SMALLEST_SIDE = 8  # below it three axes of other things than bytes are a table, not a picture
WIDE = ("int32", "int64", "uint32", "uint64")  # whose own limits stand for "no bounds"
EXACT = 2**53  # the numbers up to here are exact as float64


def is_image(space: spaces.Box) -> bool:
    """Tell pictures from vectors: three axes, or two of bytes, each channel within one range."""
    if len(space.shape) == 2:
        return space.dtype == np.uint8 and min(space.shape) >= SMALLEST_SIDE
    if len(space.shape) != 3:
        return False
    if space.dtype in (np.uint8, np.bool_):
        return True
    if not looks_like_an_image(space) or not is_bounded(space):
        return False
    axes = (0, 1) if _channels_last(space.shape) else (1, 2)
    return all((np.ptp(bound, axis=axes) == 0).all() for bound in (space.low, space.high))


def looks_like_an_image(space: spaces.Box) -> bool:
    """Tell whether a box has an image's shape, whatever its bounds are."""
    return len(space.shape) == 3 and sorted(space.shape)[1] >= SMALLEST_SIDE


def bounds_said(space: spaces.Box) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which elements of a box have a smallest number, and which a largest one."""
    below, above = space.bounded_below, space.bounded_above
    if space.dtype.name in WIDE:
        limits = np.iinfo(space.dtype.name)
        below = below & ((space.low != limits.min) | (limits.min == 0))
        above = above & (space.high != limits.max)
    return below, above


def is_bounded(space: spaces.Box) -> bool:
    """Tell whether a box says what its smallest and largest numbers are."""
    if not all(np.all(said) for said in bounds_said(space)):
        return False
    wide = space.dtype.name in WIDE
    if wide and max(abs(int(space.low.min())), abs(int(space.high.max()))) > EXACT:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(_number(space.high) - _number(space.low)).all())


class _Scale(NamedTuple):
    """What takes an image's numbers to 0…255: (x - low) / span · 255."""

    low: Any  # a number, or one for each element, channels first
    span: Any

    def __call__(self, image: NDArray[Any]) -> NDArray[np.uint8]:
        levels = np.rint((_number(image) - self.low) / self.span * (LEVELS - 1))
        pixels: NDArray[np.uint8] = np.clip(levels, 0, LEVELS - 1).astype(np.uint8)
        return pixels


def image_encoder(space: spaces.Box) -> Encoder:
    """Scale by the space's bounds, so that order is kept; the shortest axis is the channels.

    Up to 256 values stay distinct, more are rounded to 256 levels. What lies outside the bounds is
    clipped to them.
    """
    shape, dtype = space.shape, space.dtype
    last = _channels_last(shape)
    out_shape = (shape[2], *shape[:2]) if last else (1, *shape)[-3:]
    whole = dtype.kind in "iub"  # other whole numbers mean the same
    scale = _scale(space)
    table = _table(scale, dtype)
    is_plain = table is not None and bool((table == np.arange(LEVELS)).all())

    def write(observation: Any, row: NDArray[Any], lead: tuple[int, ...] = ()) -> None:
        image = np.asarray(observation)
        fits = image.dtype.kind == dtype.kind or (whole and image.dtype.kind in "iub")
        if image.shape != lead + shape or not fits:
            raise ValueError(
                f"observation is {image.dtype} {image.shape}, its space says {dtype} {lead + shape}"
            )
        if last:
            image = _channels_first(image)
        image = image.reshape(row.shape)
        if table is not None and image.dtype == dtype:
            row[...] = image if is_plain else table[image.view(np.uint8)]
            return
        if dtype.kind == "f" and not np.isfinite(image).all():
            raise FloatingPointError("observation holds values that are not finite")
        row[...] = scale(image)

    return Encoder(out_shape, "uint8", write, _remark(space))


def _channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and (shape[0] != min(shape) or shape[2] == min(shape))


def _channels_first(image: NDArray[Any]) -> NDArray[Any]:
    """Turn [..., H, W, C] into [..., C, H, W]."""
    turned: NDArray[Any] = image.swapaxes(-1, -3).swapaxes(-1, -2)
    return turned


def _scale(space: spaces.Box) -> _Scale:
    low = _number(space.low)
    span = _number(space.high) - low
    span = np.where(span > 0, span, 1.0)  # what never changes is 0
    if np.ptp(low) == 0 and np.ptp(span) == 0:
        return _Scale(float(low.flat[0]), float(span.flat[0]))
    if _channels_last(space.shape):
        low, span = _channels_first(low), _channels_first(span)
    return _Scale(low, span)


def _table(scale: _Scale, dtype: np.dtype[Any]) -> NDArray[np.uint8] | None:
    """Return what each byte becomes, where images are bytes of one range."""
    if dtype.itemsize != 1 or not isinstance(scale.span, float):
        return None
    if dtype == np.bool_:
        return scale(np.arange(LEVELS) > 0)
    return scale(np.arange(LEVELS, dtype=np.uint8).view(dtype))


def _number(values: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(values, np.float64)


def _remark(space: spaces.Box) -> str:
    low, high = float(_number(space.low).min()), float(_number(space.high).max())
    span = float((_number(space.high) - _number(space.low)).max())
    if space.dtype.kind in "iub" and span < LEVELS and math.isfinite(span):
        return ""
    return f"images of {space.dtype} from {low:g} to {high:g} are rounded to {LEVELS} levels"
