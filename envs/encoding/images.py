"""Encoder of image observations of any dtype: uint8, 0 to 255, channels first."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.envs.settings import ImageSettings
from steadyrl.envs.types import Encoder

LEVELS = 256
SMALLEST_SIDE = 8  # smaller 3-D arrays that are not uint8 are treated as vectors
WIDE = ("int32", "int64", "uint32", "uint64")  # their dtype limits mean "unbounded"
EXACT = 2**53  # integers up to here are exact in float64
# Wider ranges lose too much in 256 levels. Depth cameras have 16 bits.
WIDEST_REAL, WIDEST_WHOLE = 512, 65_535
AS_DECLARED = ImageSettings()

Axes = Literal["hwc", "chw"]


def is_image(space: spaces.Box, settings: ImageSettings = AS_DECLARED) -> bool:
    """Return whether a box is an image: 3-D, or 2-D uint8, with one range per channel."""
    if (
        settings.axes == "vector"
        or len(space.shape) not in (2, 3)
        or space.dtype.kind not in "fiub"
        or 0 in space.shape
    ):
        return False
    if settings.range is not None:
        return True
    if space.dtype in (np.uint8, np.bool_) and (len(space.shape) == 3 or settings.declared):
        return True
    if len(space.shape) == 2 and not settings.declared:
        return space.dtype == np.uint8 and min(space.shape) >= SMALLEST_SIDE
    if not (has_image_shape(space) or settings.declared) or scaling_error(space):
        return False
    channels = -1 if _axes_of(space.shape, settings) == "hwc" else 0
    axes = (0, 1) if channels or len(space.shape) == 2 else (1, 2)
    return all((np.ptp(bound, axis=axes) == 0).all() for bound in (space.low, space.high))


def has_image_shape(space: spaces.Box) -> bool:
    """Return whether a box has the shape of an image, regardless of its bounds."""
    return len(space.shape) == 3 and sorted(space.shape)[1] >= SMALLEST_SIDE


def scaling_error(space: spaces.Box) -> str:
    """Return why a box's bounds do not allow scaling to uint8; "" if they do."""
    if not is_bounded(space):
        return "have no finite bounds"
    low, high = _number(space.low), _number(space.high)
    widest = WIDEST_REAL if space.dtype.kind == "f" else WIDEST_WHOLE
    if float((high - low).max(initial=0)) <= widest:
        return ""
    return f"go from {low.min():g} to {high.max():g}, too wide for {LEVELS} levels"


def has_bounds(space: spaces.Box) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which elements of a box have a lower bound, and which an upper bound."""
    below, above = space.bounded_below, space.bounded_above
    if space.dtype.name in WIDE:
        limits = np.iinfo(space.dtype.name)
        below = below & ((space.low != limits.min) | (limits.min == 0))
        above = above & (space.high != limits.max)
    return below, above


def is_bounded(space: spaces.Box) -> bool:
    """Return whether all elements of a box have finite bounds on both sides."""
    if not all(np.all(said) for said in has_bounds(space)):
        return False
    wide = space.dtype.name in WIDE
    if wide and max(abs(int(space.low.min())), abs(int(space.high.max()))) > EXACT:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(_number(space.high) - _number(space.low)).all())


def choose_axes(shape: tuple[int, ...]) -> tuple[Axes, bool]:
    """Return whether the channels come first or last in a 3-D shape, and whether that is certain.

    Two equal neighbouring axes are height and width. Otherwise it is certain if the first or last
    axis is at most half as long as both others; if not, the two axes that differ least are taken as
    height and width.
    """
    first, middle, last = shape
    if (first == middle) != (middle == last):
        return "hwc" if first == middle else "chw", True
    shortest, second, _ = sorted(shape)
    if shortest < middle and 2 * shortest <= second:
        return "hwc" if last == shortest else "chw", True
    # max / min of either pair, compared without dividing.
    front = max(first, middle) * min(middle, last)
    back = max(middle, last) * min(first, middle)
    return "hwc" if front <= back else "chw", False


class _Scale(NamedTuple):
    """Maps pixel values to 0…255: (x - low) / span · 255."""

    low: Any  # a number, or an array of one per element, channels first
    span: Any

    def __call__(self, image: NDArray[Any]) -> NDArray[np.uint8]:
        levels = np.rint((_number(image) - self.low) / self.span * (LEVELS - 1))
        pixels: NDArray[np.uint8] = np.clip(levels, 0, LEVELS - 1).astype(np.uint8)
        return pixels


def image_encoder(space: spaces.Box, settings: ImageSettings) -> Encoder:
    """Return the encoder that scales by `env.image_range` or the space's bounds to uint8.

    Up to 256 distinct values stay distinct, more are rounded to 256 levels. Values out of bounds
    are clipped.
    """
    shape, dtype = space.shape, space.dtype
    last = len(shape) == 3 and _axes_of(shape, settings) == "hwc"
    out_shape = (shape[2], *shape[:2]) if last else (1, *shape)[-3:]
    whole = dtype.kind in "iub"  # any integer dtype is accepted
    low, high = (space.low, space.high) if settings.range is None else map(np.array, settings.range)
    scale = _scale(_number(low), _number(high), last=last)
    table = _table(scale, dtype)
    is_plain = table is not None and bool((table == np.arange(LEVELS)).all())

    def write(observation: Any, out: NDArray[Any], lead: tuple[int, ...] = ()) -> None:
        image = np.asarray(observation)
        fits = image.dtype.kind == dtype.kind or (whole and image.dtype.kind in "iub")
        if image.shape != lead + shape or not fits:
            raise ValueError(
                f"observation is {image.dtype} {image.shape}, its space says {dtype} {lead + shape}"
            )
        if last:
            image = _channels_first(image)
        image = image.reshape(out.shape)
        if table is not None and image.dtype == dtype:
            out[...] = image if is_plain else table[image.view(np.uint8)]
            return
        if dtype.kind == "f" and not np.isfinite(image).all():
            raise FloatingPointError("observation holds values that are not finite")
        out[...] = scale(image)

    remarks = [_remark_on_axes(shape, out_shape, settings), _remark_on_levels(dtype, low, high)]
    limits = (scale.low, scale.low + scale.span) if isinstance(scale.span, float) else None
    return Encoder(out_shape, "uint8", write, "; ".join(filter(None, remarks)), limits=limits)


def _axes_of(shape: tuple[int, ...], settings: ImageSettings) -> Axes:
    if settings.axes == "hwc" or settings.axes == "chw":
        return settings.axes
    return choose_axes(shape)[0] if len(shape) == 3 else "hwc"


def _channels_first(image: NDArray[Any]) -> NDArray[Any]:
    """Transpose [..., H, W, C] to [..., C, H, W]."""
    turned: NDArray[Any] = image.swapaxes(-1, -3).swapaxes(-1, -2)
    return turned


def _scale(low: NDArray[np.float64], high: NDArray[np.float64], *, last: bool) -> _Scale:
    span = np.where(high > low, high - low, 1.0)  # constant elements become 0
    if np.ptp(low) == 0 and np.ptp(span) == 0:
        return _Scale(float(low.flat[0]), float(span.flat[0]))
    if last:
        low, span = _channels_first(low), _channels_first(span)
    return _Scale(low, span)


def _table(scale: _Scale, dtype: np.dtype[Any]) -> NDArray[np.uint8] | None:
    """Return the lookup table [256] for 1-byte dtypes with one range; None otherwise."""
    if dtype.itemsize != 1 or not isinstance(scale.span, float):
        return None
    if dtype == np.bool_:
        return scale(np.arange(LEVELS) > 0)
    return scale(np.arange(LEVELS, dtype=np.uint8).view(dtype))


def _number(values: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(values, np.float64)


def _remark_on_axes(shape: tuple[int, ...], seen: tuple[int, ...], settings: ImageSettings) -> str:
    if settings.axes != "auto" or len(shape) != 3 or choose_axes(shape)[1]:
        return ""
    channels, height, width = seen
    return (
        f"images of shape {shape} are read as {channels} channels of {height}x{width}: if that is"
        " wrong, set env.image_axes=hwc, chw or vector"
    )


def _remark_on_levels(dtype: np.dtype[Any], low: NDArray[Any], high: NDArray[Any]) -> str:
    least, most = float(_number(low).min()), float(_number(high).max())
    span = float((_number(high) - _number(low)).max())
    if dtype.kind in "iub" and span < LEVELS and math.isfinite(span):
        return ""
    return f"images of {dtype} from {least:g} to {most:g} are rounded to {LEVELS} levels"
