"""Encoding of images as bytes: order of values, bounds, axes, settings and warnings."""

from __future__ import annotations

import numpy as np
import pytest
from example_spaces import IMAGES, VECTORS
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.core.errors import SettingError
from steadyrl.envs.encoding.images import choose_axes, is_image
from steadyrl.envs.encoding.spaces import observation_encoder
from steadyrl.envs.settings import ImageSettings

SIDE = 8
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "int64", "uint32", "uint64"]


def encode(space, observation):
    encoder = observation_encoder(space)
    encoded = np.full(encoder.shape, 77, encoder.dtype)
    encoder.write(observation, encoded)
    return encoded


def levels_of(space, values):
    """Return the encoded level of each value, as a pixel of an image of the space."""
    values = np.asarray(values, space.dtype)
    image = np.full(space.shape, space.low.flat[0], space.dtype)
    out = []
    for value in values:
        image[3, 2, 1] = value
        encoded = encode(space, image)
        assert encoded.dtype == np.uint8
        out.append(int(encoded[1, 3, 2]))
    return out


@st.composite
def integer_boxes(draw):
    dtype = np.dtype(draw(st.sampled_from(INTEGERS)))
    limits = np.iinfo(dtype)
    bounds = st.integers(max(int(limits.min) // 4, -(2**52)), min(int(limits.max) // 4, 2**52))
    low = draw(bounds)
    high = low + draw(st.integers(1, min(int(limits.max) - low, 65_535)))
    return spaces.Box(low, high, (SIDE, SIDE, 3), dtype), low, high


@given(integer_boxes(), st.data())
def test_integers_keep_their_order_and_up_to_256_stay_distinct(case, data):
    space, low, high = case
    some = data.draw(st.lists(st.integers(low, high), min_size=2, max_size=5, unique=True))
    values = sorted({low, high, *some})
    levels = levels_of(space, values)
    assert levels == sorted(levels)
    assert (levels[0], levels[-1]) == (0, 255)
    if high - low < 256:
        assert len(set(levels)) == len(values)


@pytest.mark.parametrize("count", [2, 3, 13, 128, 254, 255, 256])
@pytest.mark.parametrize("dtype", ["int16", "uint8"])
def test_up_to_256_integers_have_distinct_levels(dtype, count):
    space = spaces.Box(0, count - 1, (SIDE, SIDE, 3), np.dtype(dtype))
    levels = levels_of(space, range(count))
    assert levels == sorted(set(levels))


@given(
    st.sampled_from(["float16", "float32", "float64"]),
    st.floats(-256, 256, width=16),
    st.floats(-256, 256, width=16),
    st.lists(st.floats(0, 1, width=16), min_size=2, max_size=6),
)
def test_floats_keep_their_order(dtype, one, other, parts):
    low, high = sorted((one, other))
    space = spaces.Box(low, high, (SIDE, SIDE, 3), np.dtype(dtype))
    values = [low + (high - low) * part for part in sorted(parts)]
    levels = levels_of(space, [low, *values, high])
    assert levels == sorted(levels)
    assert levels[0] == 0
    assert levels[-1] == (255 if high > low else 0)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool", "int64", "float32"])
def test_binary_boards_are_encoded_as_0_and_255(dtype):
    board = np.random.default_rng(0).integers(0, 2, (SIDE, SIDE, 3)).astype(dtype)
    encoded = encode(spaces.Box(0, 1, board.shape, np.dtype(dtype)), board)
    np.testing.assert_array_equal(encoded, board.transpose(2, 0, 1).astype(np.uint8) * 255)


def test_wide_integers_do_not_wrap():
    space = spaces.Box(0, 1000, (SIDE, SIDE, 3), np.int32)
    assert levels_of(space, [0, 255, 256, 1000]) == [0, 65, 65, 255]


def test_bounds_per_channel_and_per_element_scale_the_image():
    high = np.ones((SIDE, SIDE, 3), np.uint8)
    high[..., 1], high[0, 0, 0] = 5, 100
    encoded = encode(spaces.Box(np.zeros_like(high), high, dtype=np.uint8), high)
    assert (encoded == 255).all()
    encoded = encode(spaces.Box(np.zeros_like(high), high, dtype=np.uint8), np.ones_like(high))
    assert (encoded[1] == 51).all() and (encoded[2] == 255).all()
    assert encoded[0, 0, 0] == 3 and encoded[0, 1, 0] == 255


@pytest.mark.parametrize(
    ("space", "value", "level"),
    [
        (spaces.Box(0, 1, (SIDE, SIDE, 3), np.int8), 5, 255),
        (spaces.Box(0, 1, (SIDE, SIDE, 3), np.int8), -5, 0),
        (spaces.Box(0, 1, (SIDE, SIDE, 3), np.float32), 1.5, 255),
        (spaces.Box(2, 4, (SIDE, SIDE, 3), np.uint8), 1, 0),
        (spaces.Box(0, 1000, (SIDE, SIDE, 3), np.uint16), 60000, 255),
    ],
)
def test_values_outside_the_bounds_are_clipped(space, value, level):
    assert levels_of(space, [value]) == [level]


def test_values_of_a_wider_dtype_than_the_space_are_clipped():
    space = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
    encoded = encode(space, np.full((SIDE, SIDE, 3), 256, np.uint16))
    assert (encoded == 255).all()


@pytest.mark.parametrize("dtype", ["uint8", "int64", "int16", "bool"])
@pytest.mark.parametrize("kind", ["uint8", "bool"])
def test_integers_of_another_dtype_are_accepted(kind, dtype):
    """Boards come in any integer type."""
    space = spaces.Box(0, 1, (SIDE, SIDE, 3), np.dtype(kind).type)
    board = np.random.default_rng(0).integers(0, 2, (SIDE, SIDE, 3))
    expected = 255 * board.transpose(2, 0, 1)
    np.testing.assert_array_equal(encode(space, board.astype(dtype)), expected)
    with pytest.raises(ValueError, match="its space says"):
        encode(space, board / 2)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (SIDE, SIDE, 3), np.float32),
        spaces.Box(0, np.inf, (SIDE, SIDE, 3), np.float32),
        spaces.Box(-np.inf, np.inf, (SIDE, SIDE, 3), np.int64),
        spaces.Box(2**62, 2**62 + 1, (SIDE, SIDE, 3), np.int64),
        spaces.Box(-1e308, 1e308, (SIDE, SIDE, 3), np.float64),
    ],
)
def test_boxes_without_finite_bounds_become_vectors_with_a_warning(space):
    encoder = observation_encoder(space)
    assert encoder.shape == (SIDE * SIDE * 3,)
    assert "no finite bounds" in encoder.remark
    one = np.arange(SIDE * SIDE * 3).reshape(space.shape).astype(space.dtype)
    np.testing.assert_array_equal(encode(space, one), np.arange(SIDE * SIDE * 3))


def test_a_constant_image_is_black():
    assert (encode(spaces.Box(7, 7, (SIDE, SIDE, 3), np.uint8), np.full((SIDE, SIDE, 3), 7, "u1"))
            == 0).all()  # fmt: skip


def test_rounding_and_guessed_axes_are_warned_of():
    rounded = {kind for kind, space in IMAGES.items() if observation_encoder(space).remark}
    assert rounded == {
        "depth", "int32", "float", "float, below zero", "half", "per channel", "wide",
    }  # fmt: skip
    depth = observation_encoder(IMAGES["depth"]).remark
    assert depth == "images of uint16 from 0 to 65535 are rounded to 256 levels"


def test_is_image_recognises_image_spaces():
    assert all(is_image(space) for space in IMAGES.values())
    assert not any(is_image(s) for s in VECTORS.values() if isinstance(s, spaces.Box))


WIDE = {
    "float_state": (-1e6, 1e6, np.float32),
    "all of a type": (np.finfo(np.float32).min / 2, np.finfo(np.float32).max / 2, np.float32),
    "just too wide": (0, 513, np.float64),
    "whole": (-(10**6), 10**6, np.int64),
}


@pytest.mark.parametrize("kind", WIDE)
def test_ranges_too_wide_for_bytes_stay_float_with_a_warning(kind):
    low, high, dtype = WIDE[kind]
    space = spaces.Box(low, high, (SIDE, SIDE, 3), dtype)
    encoder = observation_encoder(space)
    assert encoder.dtype == "float32" and "too wide for 256 levels" in encoder.remark
    assert "env.image_range" in encoder.remark
    one = np.arange(SIDE * SIDE * 3).reshape(space.shape).astype(dtype)
    np.testing.assert_array_equal(encode(space, one), np.arange(SIDE * SIDE * 3))


def test_parts_of_a_dict_are_vectors_and_images_need_a_setting():
    wide, image = spaces.Box(-1e6, 1e6, (SIDE, SIDE, 3)), spaces.Box(0, 255, (4, 4, 3), np.uint8)
    encoder = observation_encoder(spaces.Dict(a=wide, b=spaces.Discrete(2)))
    assert encoder.shape == (SIDE * SIDE * 3 + 2,) and "too wide" in encoder.remark
    with pytest.raises(ValueError, match=r"env\.image_axes=vector"):
        observation_encoder(spaces.Dict(a=image, b=spaces.Discrete(2)))
    encoder = observation_encoder(spaces.Dict(a=image), ImageSettings("vector"))
    assert (encoder.shape, encoder.dtype, encoder.remark) == ((48,), "float32", "")


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((4, 4, 16), "hwc"),
        ((7, 7, 20), "hwc"),
        ((8, 8, 111), "hwc"),
        ((16, 12, 12), "chw"),
        ((10, 10, 4), "hwc"),
        ((4, 84, 84), "chw"),
        ((210, 160, 3), "hwc"),
        ((12, 210, 160), "chw"),
        ((6, 7, 2), "hwc"),
    ],
)
def test_clear_shapes_determine_the_channel_axis(shape, axes):
    assert choose_axes(shape) == (axes, True)
    encoder = observation_encoder(spaces.Box(0, 255, shape, np.uint8))
    assert encoder.remark == ""
    assert encoder.shape == (shape if axes == "chw" else (shape[2], *shape[:2]))


@pytest.mark.parametrize(
    ("shape", "guess"),
    [
        ((8, 8, 8), "8 channels of 8x8"),
        ((9, 10, 14), "14 channels of 9x10"),
        ((14, 9, 10), "14 channels of 9x10"),
        ((5, 4, 3), "3 channels of 5x4"),
        ((12, 3, 12), "12 channels of 12x3"),
    ],
)
def test_ambiguous_axes_are_warned_of_and_configurable(shape, guess):
    space = spaces.Box(0, 255, shape, np.uint8)
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    remark = observation_encoder(space).remark
    assert guess in remark and "env.image_axes=" in remark
    for axes, expected in (("hwc", image.transpose(2, 0, 1)), ("chw", image)):
        encoder = observation_encoder(space, ImageSettings(axes))
        encoded = np.zeros(encoder.shape, encoder.dtype)
        encoder.write(image, encoded)
        np.testing.assert_array_equal(encoded, expected)
        assert encoder.remark == ""
    encoder = observation_encoder(space, ImageSettings("vector"))
    assert (encoder.shape, encoder.dtype) == ((image.size,), "float32")


def test_bounds_per_channel_follow_the_configured_axes():
    high = np.ones((SIDE, SIDE, SIDE), np.int16)
    high[0] = 5
    space = spaces.Box(np.zeros_like(high), high, dtype=np.int16)
    assert not is_image(space, ImageSettings("hwc"))
    encoder = observation_encoder(space, ImageSettings("chw"))
    encoded = np.zeros(encoder.shape, encoder.dtype)
    encoder.write(np.ones_like(high), encoded)
    assert (encoded[0] == 51).all() and (encoded[1:] == 255).all()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8),
        spaces.Box(0, 255, (SIDE, SIDE, 3), np.float32),
        spaces.Box(-1e6, 1e6, (SIDE, SIDE, 3), np.float32),
        spaces.Box(-np.inf, np.inf, (SIDE, SIDE, 3), np.float32),
        spaces.Box(0, 255, (SIDE, SIDE), np.float32),
        spaces.Box(0, 255, (2, 3, 2), np.int64),
    ],
)
def test_a_configured_range_overrides_the_spaces_bounds(space):
    encoder = observation_encoder(space, ImageSettings(range=(0.0, 2.0)))
    assert encoder.dtype == "uint8" and encoder.limits == (0, 2)
    encoded = np.zeros(encoder.shape, encoder.dtype)
    for value, level in ((0, 0), (1, 128), (2, 255), (7, 255)):
        encoder.write(np.full(space.shape, value, space.dtype), encoded)
        assert (encoded == level).all()


@pytest.mark.parametrize(
    ("space", "chosen", "reason"),
    [
        (spaces.Box(0, 1, (4,)), ImageSettings("hwc"), "image_axes=hwc: .* of shape"),
        (spaces.Discrete(3), ImageSettings("chw"), "image_axes=chw: .*Discrete"),
        (spaces.Discrete(3), ImageSettings(range=(0, 1)), r"image_range=\[0,1\]: .*Discrete"),
        (VECTORS["wide reals"], ImageSettings("hwc"), r"too wide.*env.image_range=\[low"),
        (VECTORS["no bounds"], ImageSettings("hwc"), r"no finite bounds.*env.image_range=\[low"),
    ],
)
def test_image_settings_of_other_spaces_are_rejected(space, chosen, reason):
    with pytest.raises(SettingError, match=reason):
        observation_encoder(space, chosen)


@pytest.mark.parametrize("shape", [(4, 36, 36, 3), (4, 3, 36, 36)])
def test_stacks_of_images_are_vectors_with_a_remark(shape):
    space = spaces.Box(0, 255, shape, np.uint8)
    encoder = observation_encoder(space)
    assert len(encoder.shape) == 1 and "env.frame_stack" in encoder.remark
    assert not observation_encoder(space, ImageSettings(axes="vector")).remark
    assert not observation_encoder(spaces.Box(0, 255, (4, 3, 2, 36), np.uint8)).remark
