"""Encoders of Gymnasium observation spaces and decoders of action spaces."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.command.literals import literal
from steadyrl.core.errors import SettingError
from steadyrl.envs.encoding.images import (
    AS_DECLARED,
    SMALLEST_SIDE,
    has_bounds,
    has_image_shape,
    image_encoder,
    is_image,
    scaling_error,
)
from steadyrl.envs.settings import ImageSettings
from steadyrl.envs.types import (
    ActionSpec,
    BoxActions,
    DiscreteActions,
    Encoder,
    MultiBinaryActions,
    MultiDiscreteActions,
)

OBSERVATIONS = (
    "Box (vectors and images), Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these"
    " without images"
)
ACTIONS = "Discrete, MultiDiscrete, MultiBinary and Box"
MOST_CATEGORIES = 2**56  # whose bytes can be counted
AS_VECTORS = ImageSettings(axes="vector")


class Decoder(NamedTuple):
    """The agent's action space; `decode` turns its actions [N, …] into N environment actions."""

    spec: ActionSpec
    decode: Callable[[NDArray[Any]], list[Any]]


def _refuse(kind: str, found: str, supported: str) -> ValueError:
    return ValueError(f"its {kind} space holds {found}, which is not supported; {supported} are")


def encoders(
    env_id: str,
    observations: spaces.Space[Any],
    actions: spaces.Space[Any],
    images: ImageSettings = AS_DECLARED,
    *,
    beside_mask: bool = False,
) -> tuple[Encoder, Decoder]:
    """Build observation encoder and action decoder; SettingError for an unsupported space."""
    try:
        encoder = observation_encoder(observations, images, beside_mask=beside_mask)
        return encoder, action_decoder(actions)
    except ValueError as error:
        raise SettingError("id", env_id, str(error)) from None


def observation_encoder(
    space: spaces.Space[Any], images: ImageSettings = AS_DECLARED, *, beside_mask: bool = False
) -> Encoder:
    """Build the encoder of an observation space; ValueError if it is not supported.

    `beside_mask`: the space is a part of a Dict that has an action mask too.
    """
    if isinstance(space, spaces.Box) and 0 in space.shape:
        raise _refuse("observation", "no numbers", OBSERVATIONS)
    if isinstance(space, spaces.Box) and is_image(space, images):
        return image_encoder(space, images)
    if isinstance(space, spaces.Dict | spaces.Tuple) and len(space.spaces) == 1:
        [(key, part)] = parts_of(space)
        if isinstance(part, spaces.Box) and is_image(part, images):
            return _only_part_encoder(key, image_encoder(part, images))
    # FilterObservation takes the keys of a Dict if they are text.
    keys = space.spaces if isinstance(space, spaces.Dict) else ()
    by_name = not beside_mask and all(isinstance(key, str) for key in keys)
    if images.declared:
        raise _not_images(space, images, by_name=by_name)
    try:
        encoder = _vector_encoder(space, images)
    except ValueError as error:
        ways = _ways_to_keep_parts(space, images, by_name=by_name)
        raise ValueError(f"{error}{ways and f'. Use {ways}'}") from None
    if not encoder.shape[0]:
        raise _refuse("observation", "no numbers", OBSERVATIONS)
    return encoder


def _ways_to_keep_parts(space: spaces.Space[Any], images: ImageSettings, *, by_name: bool) -> str:
    """Return the settings that keep supported parts of a Dict or Tuple; "" if there are none.

    `by_name`: FilterObservation sees the parts' names.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return ""
    parts, seen = parts_of(space), _images_in(space, images)
    vectors = [key for key, part in parts if key not in seen and _is_vector(part, images)]
    flat = [key for key, part in parts if _is_vector(part, AS_VECTORS)]
    ways = []
    if seen and by_name:
        ways.append(_keep_one(seen))
    if vectors and by_name:
        ways.append(f"{_keep(vectors)} for {'the ' if seen else ''}parts without images")
    if len(flat) == len(parts) > len(vectors):
        ways.append("env.image_axes=vector for all parts as one vector")
    elif len(flat) > len(vectors) and by_name:
        ways.append(f"{_keep(flat)} env.image_axes=vector for these parts as one vector")
    if flat and not by_name:
        ways.append(
            f"a wrapper of your own in env.wrappers that keeps {' or '.join(map(repr, flat))}"
        )
    return "; or ".join(ways)


def _images_in(space: spaces.Space[Any], images: ImageSettings) -> list[Any]:
    """Return the keys of a Dict's or Tuple's images."""
    parts = parts_of(space) if isinstance(space, spaces.Dict | spaces.Tuple) else []
    return [key for key, part in parts if isinstance(part, spaces.Box) and is_image(part, images)]


def _keep_one(keys: list[Any]) -> str:
    return f"{' or '.join(_keep([key]) for key in keys)} for one image"


def _keep(keys: list[Any]) -> str:
    """Return the setting that keeps parts of a Dict or Tuple, as a shell takes it."""
    names = ",".join(map(literal, keys))
    return shlex.quote(f"env.wrappers=[{{FilterObservation: {{filter_keys: [{names}]}}}}]")


def _is_vector(space: spaces.Space[Any], images: ImageSettings) -> bool:
    try:
        return _vector_encoder(space, images).shape[0] > 0
    except ValueError:
        return False


def _not_images(space: spaces.Space[Any], images: ImageSettings, *, by_name: bool) -> SettingError:
    """Return the error for observations that the settings declare as images but are not."""
    if images.range is not None:
        field, value = "image_range", f"[{','.join(f'{each:g}' for each in images.range)}]"
    else:
        field, value = "image_axes", str(images.axes)
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
        kind = f"of shape {space.shape}" if isinstance(space, spaces.Box) else type(space).__name__
        seen = _images_in(space, images) if by_name else []
        ways = f". Use {_keep_one(seen)}" if seen else ""
        return SettingError(field, value, f"its observations are not images: {kind}{ways}")
    wrong = scaling_error(space) or "have different bounds within a channel"
    reason = f"its observations {wrong}: set env.image_range=[low,high] to scale them"
    return SettingError(field, value, reason)


def _vector_encoder(space: spaces.Space[Any], images: ImageSettings, name: str = "") -> Encoder:
    if isinstance(space, spaces.Box):
        return _box_encoder(space, images)
    if isinstance(space, spaces.Discrete):
        return _one_hot_encoder((int(space.n),), (int(space.start),), shape=())
    if isinstance(space, spaces.MultiDiscrete):
        sizes, starts = space.nvec.reshape(-1), np.asarray(space.start).reshape(-1)
        return _one_hot_encoder(
            tuple(map(int, sizes)), tuple(map(int, starts)), shape=space.nvec.shape
        )
    if isinstance(space, spaces.MultiBinary):
        return _array_encoder(space.shape, scale=None)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _composite_encoder(parts_of(space), images)
    raise _refuse("observation", f"{name}{type(space).__name__}", OBSERVATIONS)


def _box_encoder(space: spaces.Box, images: ImageSettings) -> Encoder:
    if space.dtype.kind not in "fiub":
        raise _refuse("observation", f"a Box of {space.dtype}", OBSERVATIONS)
    bytes_like = space.dtype == np.uint8 and bool((space.high == 255).all())
    encoder = _array_encoder(space.shape, scale=1.0 / 255.0 if bytes_like else None)
    if bytes_like:
        encoder = encoder._replace(limits=(0.0, 255.0))
    if images.axes == "vector":
        return encoder
    if bytes_like and len(space.shape) == 4 and sorted(space.shape)[2] >= SMALLEST_SIDE:
        return encoder._replace(
            remark=f"observations of shape {space.shape} are read as vectors: let env.frame_stack "
            "stack images, in place of a wrapper"
        )
    if not has_image_shape(space):
        return encoder
    wrong = scaling_error(space)
    return encoder._replace(
        remark=wrong
        and f"observations of shape {space.shape} {wrong}: they are read as float32 vectors; "
        "declare bounds, or set env.image_range=[low,high], to read them as images"
    )


def _array_encoder(shape: tuple[int, ...], *, scale: float | None) -> Encoder:
    """Return the encoder that flattens to float32; `scale` (uint8 of 0..255) maps to [0, 1]."""
    flat = len(shape) == 1

    def write(observation: Any, out: NDArray[Any], lead: tuple[int, ...] = ()) -> None:
        if type(observation) is not np.ndarray:
            observation = np.asarray(observation)
        if observation.shape != lead + shape:
            raise ValueError(
                f"observation has shape {observation.shape}, its space says {lead + shape}"
            )
        if observation.dtype.kind not in "fiub":
            raise TypeError(f"observation is of type {observation.dtype}, expected numbers")
        out[...] = observation if flat else observation.reshape(out.shape)
        if scale is not None:
            out *= scale

    return Encoder((math.prod(shape),), "float32", write)


def _one_hot_encoder(
    sizes: tuple[int, ...], starts: tuple[int, ...], *, shape: tuple[int, ...]
) -> Encoder:
    if sum(sizes) > MOST_CATEGORIES:
        found = f"{sum(sizes):,} categories, more than one-hot vectors can have"
        raise ValueError(f"its observation space has {found}: encode them in a wrapper")
    offsets = [0, *np.cumsum(sizes)[:-1].tolist()]

    def write(observation: Any, out: NDArray[Any], lead: tuple[int, ...] = ()) -> None:
        values = np.asarray(observation)
        if values.shape != lead + shape or values.dtype.kind not in "iub":
            raise ValueError(
                f"observation is {values.dtype} {values.shape}, its space says integer "
                f"{lead + shape}"
            )
        if lead:
            for one, part in zip(values, out, strict=True):
                write(one, part)
            return
        out[:] = 0.0
        for value, offset, size, start in zip(
            values.reshape(-1).tolist(), offsets, sizes, starts, strict=True
        ):
            if not 0 <= value - start < size:
                raise ValueError(f"observation {value} lies outside {start}…{start + size - 1}")
            out[offset + value - start] = 1.0

    return Encoder((sum(sizes),), "float32", write, one_hot=True)


def parts_of(space: spaces.Dict | spaces.Tuple) -> list[tuple[Any, spaces.Space[Any]]]:
    """Return the parts of a composite space, by their keys in its observations."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(space.spaces))


def _only_part_encoder(key: Any, encoder: Encoder) -> Encoder:
    """Return the encoder of a Dict or Tuple of one image."""

    def write(observation: Any, out: NDArray[Any], lead: tuple[int, ...] = ()) -> None:
        encoder.write(_part_of(observation, key, [key]), out, lead)

    return encoder._replace(write=write)


def _part_of(observation: Any, key: Any, keys: list[Any]) -> Any:
    """Return a part of an observation, whose space has `keys`; ValueError if it has others."""
    try:
        if len(observation) == len(keys):
            return observation[key]
        found = f"has {len(observation)} parts, its space has {len(keys)}"
    except (TypeError, LookupError):
        found = f"is of type {type(observation).__name__}, its space has the parts {keys}"
    if isinstance(observation, Mapping):
        missing = [name for name in keys if name not in observation]
        unknown = [name for name in observation if name not in keys]
        if missing:
            found = f"has no {missing[0]!r}, its space has"
        elif unknown:
            found = f"has {unknown[0]!r}, its space has not"
    raise ValueError(f"observation {found}")


def _composite_encoder(
    parts: list[tuple[Any, spaces.Space[Any]]], images: ImageSettings
) -> Encoder:
    encoders: list[tuple[Any, slice, Encoder]] = []
    end = 0
    for key, part in parts:
        if isinstance(part, spaces.Box) and is_image(part, images):
            raise _refuse("observation", f"an image {key!r} among its parts", OBSERVATIONS)
        encoder = _vector_encoder(part, images, f"{key!r}, a ")
        encoders.append((key, slice(end, end + encoder.shape[0]), encoder))
        end += encoder.shape[0]

    keys = [key for key, _, _ in encoders]

    def write(observation: Any, out: NDArray[Any], lead: tuple[int, ...] = ()) -> None:
        for key, where, encoder in encoders:
            part = _part_of(observation, key, keys)
            try:
                encoder.write(part, out[..., where], lead)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{key!r}: {error}") from error

    remarks = [encoder.remark for _, _, encoder in encoders if encoder.remark]
    one_hot = all(encoder.one_hot for _, _, encoder in encoders)
    return Encoder((end,), "float32", write, "; ".join(remarks), one_hot=one_hot)


def action_decoder(space: spaces.Space[Any]) -> Decoder:
    """Build the decoder of an action space; ValueError if it is not supported."""
    if isinstance(space, spaces.Discrete):
        # NumPy's integers, as the space samples them, have what Python's lack, such as `item()`.
        actions, start, dtype = DiscreteActions(int(space.n)), int(space.start), space.dtype
        if not start and dtype == np.int64:  # as agents choose them
            return Decoder(actions, list)
        return Decoder(actions, lambda action: list((action + start).astype(dtype)))
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete_decoder(space)
    if isinstance(space, spaces.MultiBinary):
        shape, count = space.shape, int(np.prod(space.shape))
        return Decoder(
            MultiBinaryActions(count),
            lambda action: list(action.astype(np.int8).reshape(-1, *shape)),
        )
    if not isinstance(space, spaces.Box):
        raise _refuse("action", type(space).__name__, ACTIONS)
    if space.dtype.kind not in "fiu":
        raise _refuse("action", f"a Box of {space.dtype}", ACTIONS)
    return _box_decoder(space)


def _multi_discrete_decoder(space: spaces.MultiDiscrete) -> Decoder:
    shape, dtype, start = space.nvec.shape, space.dtype, np.asarray(space.start)

    def decode(action: NDArray[Any]) -> list[Any]:
        return list((action.reshape(-1, *shape) + start).astype(dtype))

    return Decoder(MultiDiscreteActions(tuple(map(int, space.nvec.reshape(-1)))), decode)


def _box_decoder(space: spaces.Box) -> Decoder:
    shape, dtype, low, high = space.shape, space.dtype, space.low, space.high
    if not low.size:
        raise _refuse("action", "no numbers", ACTIONS)
    bounds = [  # of the agent's actions: infinite where the space has none
        np.where(has, bound, endless)
        for has, bound, endless in zip(
            has_bounds(space), (low, high), (-np.inf, np.inf), strict=True
        )
    ]
    low, high = clip_bounds(space)

    def decode(action: NDArray[Any]) -> list[Any]:
        clipped = np.clip(action.reshape(-1, *shape), low, high)
        exact = (clipped if dtype.kind == "f" else np.rint(clipped)).astype(dtype, copy=False)
        return list(exact) if shape else [exact[env, ...] for env in range(len(exact))]

    flat = (tuple(map(float, bound.reshape(-1))) for bound in bounds)
    return Decoder(BoxActions(*flat), decode)


def clip_bounds(space: spaces.Box) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the bounds that actions are clipped to, before those of integers are rounded."""
    if space.dtype.kind == "f":
        return space.low, space.high
    return _inside(space.low, np.inf), _inside(space.high, -np.inf)


def _inside(bound: NDArray[Any], inwards: float) -> NDArray[np.float64]:
    """Return integer bounds as float64, rounded towards the inside where not representable."""
    near = bound.astype(np.float64)
    beyond = [
        (int(rounded) - int(exact)) * inwards < 0
        for rounded, exact in zip(near.flat, bound.flat, strict=True)
    ]
    return np.where(np.reshape(beyond, bound.shape), np.nextafter(near, inwards), near)
