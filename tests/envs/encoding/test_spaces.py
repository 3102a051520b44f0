"""Supported spaces are encoded and decoded as documented; others are rejected by name."""

from __future__ import annotations

import re
import shlex

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FilterObservation
from hydra.core.override_parser.overrides_parser import OverridesParser

from steadyrl.core.errors import SettingError
from steadyrl.envs.encoding.spaces import action_decoder, encoders, observation_encoder
from steadyrl.envs.settings import ImageSettings
from steadyrl.envs.types import (
    BoxActions,
    DiscreteActions,
    MultiBinaryActions,
    MultiDiscreteActions,
)


def encode(space, observation):
    encoder = observation_encoder(space)
    encoded = np.full(encoder.shape, 77, encoder.dtype)
    encoder.write(observation, encoded)
    return encoded


def test_discrete_observations_are_one_hot_from_their_start():
    encoded = encode(spaces.Discrete(4, start=2), np.int64(3))
    assert encoded.dtype == np.float32
    assert encoded.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("value", [1, 6, -1])
def test_discrete_observations_out_of_range_raise(value):
    with pytest.raises(ValueError, match="outside 2…5"):
        encode(spaces.Discrete(4, start=2), value)


def test_multi_discrete_observations_are_concatenated_one_hots():
    space = spaces.MultiDiscrete([2, 3], start=[0, 1])
    assert encode(space, np.array([1, 3])).tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("space", "one_hot"),
    [
        (spaces.Discrete(4), True),
        (spaces.MultiDiscrete([2, 3]), True),
        (spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 3]))), True),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (2,))), False),
        (spaces.MultiBinary(3), False),
        (spaces.Box(0, 1, (4,)), False),
    ],
)
def test_one_hot_encoders_say_so(space, one_hot):
    """Not where other numbers stand beside."""
    assert observation_encoder(space).one_hot is one_hot


def test_multi_binary_observations_are_zeros_and_ones():
    assert encode(spaces.MultiBinary(3), np.array([1, 0, 1], np.int8)).tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16])
def test_boxes_are_flattened_to_float32(dtype):
    encoded = encode(spaces.Box(-9, 9, (2, 3), dtype), np.arange(6).reshape(2, 3).astype(dtype))
    assert encoded.dtype == np.float32
    assert encoded.tolist() == [0, 1, 2, 3, 4, 5]


def test_scalar_boxes_are_vectors_of_length_1():
    assert encode(spaces.Box(0, 1, (), np.float32), np.float32(0.5)).tolist() == [0.5]


def test_uint8_vectors_are_scaled_to_0_1():
    encoded = encode(spaces.Box(0, 255, (3,), np.uint8), np.array([0, 51, 255], np.uint8))
    np.testing.assert_allclose(encoded, [0, 0.2, 1], rtol=1e-6)


def test_dict_and_tuple_are_flattened_in_order():
    space = spaces.Dict(
        b=spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (1, 2))]), a=spaces.MultiBinary(2)
    )
    observation = {"b": (1, np.array([[0.5, -0.5]])), "a": np.array([1, 0])}
    encoded = encode(space, observation)
    by_key = {"a": [1, 0], "b": [0, 1, 0.5, -0.5]}
    assert encoded.tolist() == [x for key in space.spaces for x in by_key[key]]


IMAGE = np.random.default_rng(0).integers(0, 256, (84, 80, 3), np.uint8)
CHANNELS_FIRST = IMAGE.transpose(2, 0, 1)


@pytest.mark.parametrize(
    ("space", "observation", "expected"),
    [
        (spaces.Box(0, 255, (84, 80, 3), np.uint8), IMAGE, CHANNELS_FIRST),
        (
            spaces.Box(0, 255, (3, 84, 80), np.uint8),
            CHANNELS_FIRST,
            CHANNELS_FIRST,
        ),
        (spaces.Box(0, 255, (84, 80), np.uint8), IMAGE[..., 0], IMAGE[None, ..., 0]),
        (
            spaces.Box(0, 1, (84, 80, 3), np.float32),
            IMAGE / np.float32(255),
            CHANNELS_FIRST,
        ),
        (spaces.Box(-1, 1, (84, 80, 3)), IMAGE / np.float32(127.5) - 1, CHANNELS_FIRST),
        (spaces.Box(0, 1, (84, 80, 3), bool), IMAGE > 99, (IMAGE > 99).transpose(2, 0, 1) * 255),
        (spaces.Box(0, 1, (10, 10, 10), bool), IMAGE[:10, :10, :1] > np.arange(10), None),
    ],
)
def test_images_are_encoded_as_uint8_channels_first(space, observation, expected):
    encoded = encode(space, observation)
    assert encoded.dtype == np.uint8
    if expected is None:  # a cube: the last axis is the channels
        expected = observation.transpose(2, 0, 1) * 255
    np.testing.assert_array_equal(encoded, expected)


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (spaces.Box(-1, 1, (3,)), np.zeros(2, np.float32)),
        (spaces.Box(-1, 1, (3,)), np.float32(0)),
        (spaces.Box(-1, 1, (3,)), np.array(["a", "b", "c"])),
        (spaces.Box(-1, 1, (3,)), None),
        (spaces.Box(0, 255, (84, 84, 3), np.uint8), np.zeros((84, 84, 1), np.uint8)),
        (spaces.Box(0, 255, (84, 84, 3), np.uint8), np.zeros((84, 84, 3))),
        (spaces.Box(0, 1, (84, 84, 3)), np.full((84, 84, 3), np.nan, np.float32)),
        (spaces.Discrete(3), 1.0),
        (spaces.MultiDiscrete([2, 2]), np.array([1])),
        (spaces.Tuple([spaces.Discrete(2)]), (1, 1)),
    ],
)
def test_an_observation_outside_its_space_raises(space, observation):
    with pytest.raises((ValueError, TypeError, FloatingPointError)):
        encode(space, observation)


PARTS = spaces.Dict(wheel=spaces.Box(-1, 1, (1,)), gear=spaces.Dict(at=spaces.Discrete(3)))
RIGHT = {"wheel": np.zeros(1), "gear": {"at": 1}}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (RIGHT | {"wheel": np.zeros(())}, "'wheel': observation has shape (), its space says (1,)"),
        (RIGHT | {"wheel": ["a"]}, "'wheel': observation is of type <U1, expected numbers"),
        (RIGHT | {"gear": {"at": 3}}, "'gear': 'at': observation 3 lies outside 0…2"),
        (RIGHT | {"gear": {"in": 3}}, "'gear': observation has no 'at', its space has"),
        ({"wheel": np.zeros(1)}, "observation has no 'gear', its space has"),
        (RIGHT | {"spare": 1}, "observation has 'spare', its space has not"),
        ((1, 2), "observation is of type tuple, its space has the parts ['wheel', 'gear']"),
        (None, "observation is of type NoneType, its space has the parts ['wheel', 'gear']"),
    ],
)
def test_an_error_names_the_part_of_the_observation(changed, reason):
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        encode(PARTS, changed)


@pytest.mark.parametrize("images", [ImageSettings(), ImageSettings(axes="hwc")])
def test_an_image_without_pixels_is_refused_and_as_a_part_is_none(images):
    space = spaces.Box(0, 255, (0, 12, 3), np.uint8)
    with pytest.raises(ValueError, match="holds no numbers"):
        observation_encoder(space, images)
    beside = spaces.Dict(eye=space, speed=spaces.Box(-1, 1, (2,)))
    assert encode(beside, {"eye": np.zeros((0, 12, 3)), "speed": [0.5, 1]}).tolist() == [0.5, 1]


def test_a_one_hot_vector_longer_than_any_memory_is_refused():
    with pytest.raises(ValueError, match="categories, more than one-hot vectors can have"):
        observation_encoder(spaces.Discrete(2**62))


def test_filters_are_recommended_for_keys_that_are_text_only():
    numbered = spaces.Dict([(1, spaces.Text(4)), (2, spaces.Box(-1, 1, (2,)))])
    with pytest.raises(ValueError, match=r"Use a wrapper of your own .* that keeps 2$"):
        observation_encoder(numbered)


IMAGE_SPACE = spaces.Box(0, 255, (84, 84, 3), np.uint8)


@pytest.mark.parametrize(
    ("space", "wrap"),
    [
        (spaces.Dict(eye=IMAGE_SPACE), lambda image: {"eye": image}),
        (spaces.Tuple([IMAGE_SPACE]), lambda image: (image,)),
    ],
)
def test_a_dict_or_tuple_of_one_image_is_that_image(space, wrap):
    image = IMAGE_SPACE.sample()
    assert (encode(space, wrap(image)) == encode(IMAGE_SPACE, image)).all()
    encoder = observation_encoder(space)
    assert encoder.limits == (0, 255)
    batch = np.zeros((2, *encoder.shape), np.uint8)
    encoder.write(wrap(np.stack([image, image])), batch, (2,))
    assert (batch == encode(IMAGE_SPACE, image)).all()
    with pytest.raises(ValueError, match="observation has 2 parts, its space has 1"):
        encode(space, [image, 1])


@pytest.mark.parametrize(
    ("observations", "actions", "reason"),
    [
        (spaces.Text(4), spaces.Discrete(2), "observation space holds Text"),
        (spaces.Sequence(spaces.Discrete(2)), spaces.Discrete(2), "Sequence"),
        (spaces.Graph(spaces.Box(0, 1, (1,)), None), spaces.Discrete(2), "Graph"),
        (spaces.Dict(eye=IMAGE_SPACE, x=spaces.Discrete(2)), spaces.Discrete(2), "an image 'eye'"),
        (
            spaces.Dict(eye=IMAGE_SPACE, x=spaces.Text(4)),
            spaces.Discrete(2),
            r"wrappers=\[{FilterObservation: {filter_keys: \[eye\]}}\]' for one image",
        ),
        (spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(2)), "action space holds Dict"),
        (spaces.Discrete(2), spaces.Text(3), "action space holds Text"),
        (spaces.Box(0, 1, (0,)), spaces.Discrete(2), "observation space holds no numbers"),
        (spaces.Dict(a=spaces.Box(0, 1, (2, 0))), spaces.Discrete(2), "holds no numbers"),
        (spaces.Discrete(2), spaces.Box(0, 1, (0,)), "action space holds no numbers"),
        (spaces.Discrete(2), spaces.Box(0, 1, (2,), bool), "action space holds a Box of bool"),
    ],
)
def test_unsupported_spaces_are_rejected_by_name(observations, actions, reason):
    with pytest.raises(SettingError, match=reason) as caught:
        encoders("Some-v0", observations, actions)
    assert "Discrete" in caught.value.reason
    assert caught.value.value == "Some-v0"


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict(eye=IMAGE_SPACE, way=spaces.Discrete(2)),
        spaces.Tuple([spaces.Discrete(2), IMAGE_SPACE]),
        spaces.Dict(text=spaces.Text(4), way=spaces.Discrete(2)),
    ],
)
def test_a_dict_or_tuple_that_is_declared_an_image_names_its_images(space):
    declared = ImageSettings(axes="hwc")
    with pytest.raises(SettingError, match=r"are not images: (Dict|Tuple)") as caught:
        encoders("Some-v0", space, spaces.Discrete(2), declared)
    _, _, ways = caught.value.reason.partition(". Use ")
    assert bool(ways) == ("Text" not in str(space))
    if ways:
        [setting] = [word for word in shlex.split(ways) if word.startswith("env.")]
        [wrapper] = OverridesParser.create().parse_override(setting).value()
        env = gym.Env()
        env.observation_space = space
        kept = gym.wrappers.FilterObservation(env, **wrapper["FilterObservation"])
        assert observation_encoder(kept.observation_space, declared).dtype == "uint8"


@pytest.mark.parametrize(
    ("space", "choices"),
    [
        (
            spaces.Dict(eye=IMAGE_SPACE, text=spaces.Text(4), way=spaces.Discrete(2)),
            {"eye": "auto", "way": "auto", "eye,way": "vector"},
        ),
        (spaces.Dict(eye=IMAGE_SPACE, ear=IMAGE_SPACE), {"eye": "auto", "ear": "auto"}),
        (spaces.Dict(text=spaces.Text(4), way=spaces.Discrete(2)), {"way": "auto"}),
        (spaces.Tuple([spaces.Text(4), spaces.Discrete(2)]), {"1": "auto"}),
        (spaces.Dict(deep=spaces.Dict(eye=IMAGE_SPACE), way=spaces.Discrete(2)), {"way": "auto"}),
        (
            spaces.Dict({"0": IMAGE_SPACE, "null": spaces.Discrete(2)}),
            {'"0"': "auto", '"null"': "auto"},
        ),
        (
            spaces.Dict({'a, "b"': IMAGE_SPACE, "ö": spaces.Discrete(2)}),
            {'"a, \\"b\\""': "auto", '"ö"': "auto"},
        ),
        (spaces.Dict(text=spaces.Text(4)), {}),
        (spaces.Dict(a=spaces.Dict(eye=IMAGE_SPACE), b=spaces.Dict(eye=IMAGE_SPACE)), {}),
    ],
)
def test_a_refused_dict_or_tuple_names_the_parts_that_can_be_kept(space, choices):
    with pytest.raises(SettingError) as caught:
        encoders("Some-v0", space, spaces.Discrete(2))
    _, _, ways = caught.value.reason.partition(". Use ")
    words = [word for word in shlex.split(ways) if word.startswith("env.")]
    settings = [word for word in words if word.startswith("env.wrappers=")]
    whole = "env.wrappers=[{FilterObservation: {filter_keys: [%s]}}]"
    assert settings == [whole % kept for kept in choices]
    assert words.count("env.image_axes=vector") == len(words) - len(settings) <= 1
    if re.search("(or|Use) env.image_axes=vector", ways):
        observation_encoder(space, ImageSettings(axes="vector"))
    env = gym.Env()
    env.observation_space = space
    for axes, setting in zip(choices.values(), settings, strict=True):
        [wrapper] = OverridesParser.create().parse_override(setting).value()
        names = wrapper["FilterObservation"]["filter_keys"]
        filtered = FilterObservation(env, filter_keys=names).observation_space
        observation_encoder(filtered, ImageSettings(axes=axes))


def test_discrete_actions_start_where_the_space_does():
    decoder = action_decoder(spaces.Discrete(3, start=-1))
    assert decoder.spec == DiscreteActions(3)
    assert decoder.decode(np.array([0, 1, 2])) == [-1, 0, 1]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.Discrete(3, start=-1, dtype=np.int8),
        spaces.MultiDiscrete([2, 3], start=[1, 0]),
        spaces.MultiBinary(2),
        spaces.Box(-1, 1, ()),
        spaces.Box(0, 9, (2,), np.int16),
    ],
)
def test_actions_have_the_types_that_the_space_samples(space):
    count = int(np.prod(space.shape))
    given = np.ones(1 if isinstance(space, spaces.Discrete) else (1, count), np.int64)
    sampled, [action] = space.sample(), action_decoder(space).decode(given)
    assert (type(action), action.dtype) == (type(sampled), sampled.dtype)
    assert space.contains(action)


def test_box_actions_are_reshaped_and_clipped():
    low, high = np.array([[-1, 0], [0, 0]], np.float32), np.array([[1, 2], [3, 4]], np.float32)
    decoder = action_decoder(spaces.Box(low, high))
    assert decoder.spec == BoxActions((-1, 0, 0, 0), (1, 2, 3, 4))
    (action,) = decoder.decode(np.array([[-5, 1, 9, 4]], np.float32))
    assert action.dtype == np.float32
    assert action.tolist() == [[-1, 1], [3, 4]]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32"])
def test_decoded_box_actions_are_always_in_their_space(dtype):
    low, high = (-0.3, 0.3) if dtype.startswith("float") else (0, 100)
    space = spaces.Box(low, high, (2,), np.dtype(dtype).type)
    decoder = action_decoder(space)
    for value in (-1e30, -1.0, 0.1, 0.2999999, 99.7, 1e30):
        (action,) = decoder.decode(np.full((1, 2), value, np.float32))
        assert action.dtype == dtype and space.contains(action), value


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_unbounded_integer_boxes_use_the_dtypes_limits(dtype):
    limits = np.iinfo(dtype)
    space = spaces.Box(-np.inf, np.inf, (1,), np.dtype(dtype).type)
    decoder = action_decoder(space)
    assert decoder.spec == BoxActions((-np.inf,), (np.inf,))
    for value, sent in ((-1e30, limits.min), (2.6, 3), (1e30, limits.max)):
        (action,) = decoder.decode(np.array([[value]], np.float32))
        assert space.contains(action)
        assert action[0] == pytest.approx(sent, rel=1e-15)  # up to float64's precision


def test_multi_discrete_and_multi_binary_actions_are_decoded():
    space = spaces.MultiDiscrete([3, 4], start=[1, 0])
    decoder = action_decoder(space)
    assert decoder.spec == MultiDiscreteActions((3, 4))
    assert space.contains(decoder.decode(np.array([[2, 3]]))[0])
    binary = spaces.MultiBinary([2, 2])
    decoder = action_decoder(binary)
    assert decoder.spec == MultiBinaryActions(4)
    assert binary.contains(decoder.decode(np.array([[1, 0, 1, 1]]))[0])
