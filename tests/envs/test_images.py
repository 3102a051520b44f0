"""Images keep their order and, while there are at most 256 of them, their values."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from shown_spaces import IMAGES, VECTORS

from envs.images import is_image
from envs.spaces import observation_encoder

SIDE = 8
WHOLE = ["int8", "uint8", "int16", "uint16", "int32", "int64", "uint32", "uint64"]


def encode(space, observation):
    encoder = observation_encoder(space)
    row = np.full(encoder.shape, 77, encoder.dtype)
    encoder.write(observation, row)
    return row


def levels_of(space, values):
    """Return what each value becomes as a pixel of an image of the space."""
    values = np.asarray(values, space.dtype)
    image = np.full(space.shape, space.low.flat[0], space.dtype)
    out = []
    for value in values:
        image[3, 2, 1] = value
        row = encode(space, image)
        assert row.dtype == np.uint8
        out.append(int(row[1, 3, 2]))
    return out


@st.composite
def whole_boxes(draw):
    dtype = np.dtype(draw(st.sampled_from(WHOLE)))
    limits = np.iinfo(dtype)
    bounds = st.integers(max(int(limits.min) // 4, -(2**52)), min(int(limits.max) // 4, 2**52))
    low = draw(bounds)
    high = low + draw(st.integers(1, min(int(limits.max) - low, 100_000)))
    return spaces.Box(low, high, (SIDE, SIDE, 3), dtype), low, high


@given(whole_boxes(), st.data())
def test_whole_numbers_keep_their_order_and_up_to_256_stay_distinct(case, data):
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
def test_every_one_of_up_to_256_values_has_a_level_of_its_own(dtype, count):
    space = spaces.Box(0, count - 1, (SIDE, SIDE, 3), np.dtype(dtype))
    levels = levels_of(space, range(count))
    assert levels == sorted(set(levels))


@given(
    st.sampled_from(["float16", "float32", "float64"]),
    st.floats(-1e4, 1e4, width=16),
    st.floats(-1e4, 1e4, width=16),
    st.lists(st.floats(0, 1, width=16), min_size=2, max_size=6),
)
def test_real_numbers_keep_their_order(dtype, one, other, parts):
    low, high = sorted((one, other))
    space = spaces.Box(low, high, (SIDE, SIDE, 3), np.dtype(dtype))
    values = [low + (high - low) * part for part in sorted(parts)]
    levels = levels_of(space, [low, *values, high])
    assert levels == sorted(levels)
    assert levels[0] == 0
    assert levels[-1] == (255 if high > low else 0)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool", "int64", "float32"])
def test_a_board_of_zeros_and_ones_is_black_and_white(dtype):
    board = np.random.default_rng(0).integers(0, 2, (SIDE, SIDE, 3)).astype(dtype)
    row = encode(spaces.Box(0, 1, board.shape, np.dtype(dtype)), board)
    np.testing.assert_array_equal(row, board.transpose(2, 0, 1).astype(np.uint8) * 255)


def test_256_and_1000_are_not_the_same():
    space = spaces.Box(0, 1000, (SIDE, SIDE, 3), np.int32)
    assert levels_of(space, [0, 255, 256, 1000]) == [0, 65, 65, 255]


def test_bounds_of_each_channel_and_of_each_element_count():
    high = np.ones((SIDE, SIDE, 3), np.uint8)
    high[..., 1], high[0, 0, 0] = 5, 100
    row = encode(spaces.Box(np.zeros_like(high), high, dtype=np.uint8), high)
    assert (row == 255).all()
    row = encode(spaces.Box(np.zeros_like(high), high, dtype=np.uint8), np.ones_like(high))
    assert (row[1] == 51).all() and (row[2] == 255).all()
    assert row[0, 0, 0] == 3 and row[0, 1, 0] == 255


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
def test_what_lies_outside_the_bounds_is_clipped(space, value, level):
    assert levels_of(space, [value]) == [level]


def test_a_larger_whole_type_than_the_space_says_does_not_wrap():
    space = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
    row = encode(space, np.full((SIDE, SIDE, 3), 256, np.uint16))
    assert (row == 255).all()


@pytest.mark.parametrize("dtype", ["uint8", "int64", "int16", "bool"])
@pytest.mark.parametrize("kind", ["uint8", "bool"])
def test_whole_numbers_of_another_type_are_what_they_are(kind, dtype):
    """Boards come as whatever NumPy made of them."""
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
def test_without_bounds_there_is_no_image_and_that_is_remarked(space):
    encoder = observation_encoder(space)
    assert encoder.shape == (SIDE * SIDE * 3,)
    assert "no finite bounds" in encoder.remark
    one = np.arange(SIDE * SIDE * 3).reshape(space.shape).astype(space.dtype)
    np.testing.assert_array_equal(encode(space, one), np.arange(SIDE * SIDE * 3))


def test_a_constant_image_is_black():
    assert (encode(spaces.Box(7, 7, (SIDE, SIDE, 3), np.uint8), np.full((SIDE, SIDE, 3), 7, "u1"))
            == 0).all()  # fmt: skip


def test_only_rounding_is_remarked():
    rounded = {kind for kind, space in IMAGES.items() if observation_encoder(space).remark}
    assert rounded == {
        "depth", "int32", "float", "float, below zero", "half", "per channel",
    }  # fmt: skip
    depth = observation_encoder(IMAGES["depth"]).remark
    assert depth == "images of uint16 from 0 to 65535 are rounded to 256 levels"


def test_which_boxes_are_images():
    assert all(is_image(space) for space in IMAGES.values())
    assert not any(is_image(s) for s in VECTORS.values() if isinstance(s, spaces.Box))
