"""Translate between Gymnasium's spaces and the rows of the timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.types import (
    ActionSpec,
    BoxActions,
    DiscreteActions,
    MultiBinaryActions,
    MultiDiscreteActions,
)
from memory.errors import SettingError

Write = Callable[[Any, NDArray[Any]], None]  # (observation, row to write it to)

OBSERVATIONS = (
    "Box (vectors and images), Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these"
    " without images"
)
ACTIONS = "Discrete, MultiDiscrete, MultiBinary and Box"


class Encoder(NamedTuple):
    """How one observation becomes one frame: its shape, its dtype, and the writing of it."""

    shape: tuple[int, ...]
    dtype: str  # "float32" or "uint8"
    write: Write


class Decoder(NamedTuple):
    """What an agent may send, and how a batch [N, …] of it becomes N environment actions."""

    spec: ActionSpec
    decode: Callable[[NDArray[Any]], list[Any]]


def _refuse(kind: str, found: str, supported: str) -> ValueError:
    return ValueError(f"its {kind} space holds {found}, which is not supported; {supported} are")


def encoders(
    env_id: str, observations: spaces.Space[Any], actions: spaces.Space[Any]
) -> tuple[Encoder, Decoder]:
    """Build both translators of one environment, or refuse it naming the space at fault."""
    try:
        return observation_encoder(observations), action_decoder(actions)
    except ValueError as error:
        raise SettingError("id", env_id, str(error)) from None


def observation_encoder(space: spaces.Space[Any]) -> Encoder:
    """Build the encoder of an observation space, or refuse the space by name."""
    if isinstance(space, spaces.Box) and _is_image(space):
        return _image_encoder(space)
    return _vector_encoder(space)


def _vector_encoder(space: spaces.Space[Any]) -> Encoder:
    if isinstance(space, spaces.Box):
        return _box_encoder(space)
    if isinstance(space, spaces.Discrete):
        return _one_hot_encoder((int(space.n),), (int(space.start),), shape=())
    if isinstance(space, spaces.MultiDiscrete):
        sizes, starts = space.nvec.reshape(-1), np.asarray(space.start).reshape(-1)
        return _one_hot_encoder(
            tuple(map(int, sizes)), tuple(map(int, starts)), shape=space.nvec.shape
        )
    if isinstance(space, spaces.MultiBinary):
        return _array_encoder(space.shape, scale=None)
    if isinstance(space, spaces.Dict):
        return _composite_encoder(list(space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return _composite_encoder(list(enumerate(space.spaces)))
    raise _refuse("observation", type(space).__name__, OBSERVATIONS)


def _is_image(space: spaces.Box) -> bool:
    """Tell pictures from vectors: three axes, or two of bytes, within one range."""
    if len(space.shape) == 2:
        return space.dtype == np.uint8 and min(space.shape) >= 8
    if len(space.shape) != 3:
        return False
    if space.dtype == np.uint8 or _is_truth(space):
        return True
    low, high = space.low.flat[0], space.high.flat[0]
    uniform = bool((space.low == low).all() and (space.high == high).all())
    return uniform and bool(np.isfinite(low) and np.isfinite(high)) and _spatial(space.shape) >= 8


def _is_truth(space: spaces.Box) -> bool:
    return space.dtype == np.bool_


def _spatial(shape: tuple[int, ...]) -> int:
    return sorted(shape)[1]


def _image_encoder(space: spaces.Box) -> Encoder:
    """Channels first, bytes from 0 to 255 whatever the range; the shortest axis is the channels."""
    shape = space.shape
    if len(shape) == 2:
        order: tuple[int, ...] | None = None
        out_shape: tuple[int, ...] = (1, *shape)
    elif shape[0] == min(shape) and shape[2] != min(shape):
        order, out_shape = None, shape
    else:
        order, out_shape = (2, 0, 1), (shape[2], shape[0], shape[1])
    dtype = space.dtype
    low = float(space.low.flat[0])
    scale = 255.0 / (float(space.high.flat[0]) - low) if dtype.kind == "f" else 1.0

    def write(observation: Any, row: NDArray[Any]) -> None:
        image = np.asarray(observation)
        if image.shape != shape or image.dtype.kind != dtype.kind:
            raise ValueError(
                f"observation is {image.dtype} {image.shape}, its space says {dtype} {shape}"
            )
        if order is not None:
            image = image.transpose(order)
        if dtype == np.uint8:
            row[...] = image
        elif dtype == np.bool_:
            np.multiply(image, np.uint8(255), out=row.reshape(image.shape))
        else:
            if not np.isfinite(image).all():
                raise FloatingPointError("observation holds values that are not finite")
            row[...] = np.clip(np.rint((image - low) * scale), 0, 255)

    return Encoder(out_shape, "uint8", write)


def _box_encoder(space: spaces.Box) -> Encoder:
    if space.dtype.kind == "c":
        raise _refuse("observation", f"a Box of {space.dtype}", OBSERVATIONS)
    bytes_like = space.dtype == np.uint8 and bool((space.high == 255).all())
    return _array_encoder(space.shape, scale=1.0 / 255.0 if bytes_like else None)


def _array_encoder(shape: tuple[int, ...], *, scale: float | None) -> Encoder:
    """Flatten numbers to float32; bytes that span 0..255 are scaled to [0, 1]."""
    flat = len(shape) == 1

    def write(observation: Any, row: NDArray[Any]) -> None:
        if type(observation) is not np.ndarray:
            observation = np.asarray(observation)
        if observation.shape != shape:
            raise ValueError(f"observation has shape {observation.shape}, its space says {shape}")
        if observation.dtype.kind not in "fiub":
            raise TypeError(f"observation is of type {observation.dtype}, expected numbers")
        row[:] = observation if flat else observation.reshape(-1)
        if scale is not None:
            row *= scale

    return Encoder((int(np.prod(shape)),), "float32", write)


def _one_hot_encoder(
    sizes: tuple[int, ...], starts: tuple[int, ...], *, shape: tuple[int, ...]
) -> Encoder:
    offsets = [0, *np.cumsum(sizes)[:-1].tolist()]

    def write(observation: Any, row: NDArray[Any]) -> None:
        values = np.asarray(observation)
        if values.shape != shape or values.dtype.kind not in "iu":
            raise ValueError(
                f"observation is {values.dtype} {values.shape}, its space says integer {shape}"
            )
        row[:] = 0.0
        for value, offset, size, start in zip(
            values.reshape(-1).tolist(), offsets, sizes, starts, strict=True
        ):
            if not 0 <= value - start < size:
                raise ValueError(f"observation {value} lies outside {start}…{start + size - 1}")
            row[offset + value - start] = 1.0

    return Encoder((sum(sizes),), "float32", write)


def _composite_encoder(parts: list[tuple[Any, spaces.Space[Any]]]) -> Encoder:
    encoders: list[tuple[Any, slice, Write]] = []
    end = 0
    for key, part in parts:
        if isinstance(part, spaces.Box) and _is_image(part):
            raise _refuse("observation", f"an image {key!r} among its parts", OBSERVATIONS)
        encoder = _vector_encoder(part)
        encoders.append((key, slice(end, end + encoder.shape[0]), encoder.write))
        end += encoder.shape[0]

    def write(observation: Any, row: NDArray[Any]) -> None:
        if len(observation) != len(encoders):
            raise ValueError(
                f"observation has {len(observation)} parts, its space has {len(encoders)}"
            )
        for key, where, write_part in encoders:
            write_part(observation[key], row[where])

    return Encoder((end,), "float32", write)


def action_decoder(space: spaces.Space[Any]) -> Decoder:
    """Build the decoder of an action space, or refuse the space by name."""
    if isinstance(space, spaces.Discrete):
        return _discrete_decoder(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete_decoder(space)
    if isinstance(space, spaces.MultiBinary):
        shape, count = space.shape, int(np.prod(space.shape))
        return Decoder(
            MultiBinaryActions(count),
            lambda action: list(action.astype(np.int8).reshape(-1, *shape)),
        )
    if isinstance(space, spaces.Box) and space.dtype.kind in "fiu":
        return _box_decoder(space)
    raise _refuse("action", type(space).__name__, ACTIONS)


def _discrete_decoder(n: int, start: int) -> Decoder:
    if start == 0:
        return Decoder(DiscreteActions(n), lambda action: action.tolist())
    return Decoder(DiscreteActions(n), lambda action: (action + start).tolist())


def _multi_discrete_decoder(space: spaces.MultiDiscrete) -> Decoder:
    shape, dtype, start = space.nvec.shape, space.dtype, np.asarray(space.start)

    def decode(action: NDArray[Any]) -> list[Any]:
        return list((action.reshape(-1, *shape) + start).astype(dtype))

    return Decoder(MultiDiscreteActions(tuple(map(int, space.nvec.reshape(-1)))), decode)


def _box_decoder(space: spaces.Box) -> Decoder:
    shape, dtype, low, high = space.shape, space.dtype, space.low, space.high

    def decode(action: NDArray[Any]) -> list[Any]:
        clipped = np.clip(action.reshape(-1, *shape), low, high)
        return list(clipped if dtype.kind == "f" else np.rint(clipped).astype(dtype))

    flat = (tuple(map(float, bound.reshape(-1))) for bound in (low, high))
    return Decoder(BoxActions(*flat), decode)
