"""Spaces as plain values: read back they are equal, and a stranger's file builds nothing else."""

import json
from collections import OrderedDict
from copy import deepcopy

import numpy as np
import pytest
from gymnasium import spaces

from steadyrl.envs.encoding.description import (
    MOST_ELEMENTS,
    describe_spaces,
    place_in,
    read_spaces,
)
from steadyrl.envs.encoding.spaces import observation_encoder

ACTIONS = spaces.Discrete(3, start=2)
INF = np.inf
DESCRIBED = [
    spaces.Box(-INF, INF, (3,), np.float32),
    spaces.Box(np.array([-1.5, -INF]), np.array([0.1, 2.0]), dtype=np.float64),
    spaces.Box(0, 255, (84, 84, 3), np.uint8),
    spaces.Box(-INF, INF, (2,), np.int64),
    spaces.Box(-INF, 5, (2, 1), np.int8),
    spaces.Box(-(2**63), 2**63 - 2, (2,), np.int64),
    spaces.Box(0, 2**64 - 1, (2,), np.uint64),
    spaces.Box(0, 1, (3,), np.bool_),
    spaces.Box(0, 1, (), np.float16),
    spaces.Discrete(5, start=-3, dtype=np.int32),
    spaces.MultiDiscrete([2, 3], start=[1, 0]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), dtype=np.int16),
    spaces.MultiBinary(4),
    spaces.MultiBinary((2, 3)),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple((ACTIONS, spaces.MultiBinary(3)))}),
    spaces.Dict(OrderedDict(b=spaces.Discrete(2), a=spaces.Discrete(3))),
    spaces.Dict([(1, spaces.Discrete(2)), ("a", spaces.Discrete(3))]),
]


COMPOSITE = [space for space in DESCRIBED if isinstance(space, spaces.Dict)]


def saved(observations, actions=ACTIONS, axes="auto"):
    """Return the description as a file gives it back."""
    return json.loads(json.dumps(describe_spaces(observations, actions, axes)))


@pytest.mark.parametrize("space", DESCRIBED, ids=str)
def test_spaces_read_back_are_equal(space):
    found, actions, axes = read_spaces(saved(space, space, "chw"))
    assert (found, actions, axes) == (space, space, "chw")
    assert found.dtype == space.dtype and str(found) == str(space)
    if isinstance(space, spaces.Box):
        for name in ("low", "high", "bounded_below", "bounded_above"):
            assert getattr(found, name).dtype == getattr(space, name).dtype
            assert (getattr(found, name) == getattr(space, name)).all()
    if isinstance(space, spaces.Dict):
        assert list(found.spaces) == list(space.spaces)


class OwnBox(spaces.Box):
    """May mean something else."""


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(4),
        spaces.Sequence(ACTIONS),
        OwnBox(0, 1, (2,)),
        spaces.Discrete(MOST_ELEMENTS + 1),
        spaces.Dict({"a": spaces.Text(4)}),
        spaces.Dict({("a", 1): ACTIONS}),
        spaces.Tuple([spaces.Discrete(MOST_ELEMENTS)] * 2),
        spaces.Box(np.arange(20_000.0), INF, dtype=np.float64),
    ],
    ids=lambda space: str(space)[:40],
)
def test_other_spaces_are_not_described(space):
    assert describe_spaces(space, ACTIONS, "auto") is None
    assert describe_spaces(ACTIONS, space, "auto") is None


BOX = {"kind": "Box", "shape": [2], "dtype": "float32", "low": None, "high": [1.0, 2.0]}
NESTED = BOX
for _ in range(20):
    NESTED = {"kind": "Tuple", "parts": [[0, NESTED]]}


@pytest.mark.parametrize(
    "plain",
    [
        None, [], "Box", {}, {"kind": "Graph"}, {"kind": ["Box"]}, {"kind": "Box"},
        {**BOX, "seed": 0}, {**BOX, "kind": "os.system"},
        {**BOX, "shape": [10**12]}, {**BOX, "shape": [2048, 2049], "high": 1.0},
        {**BOX, "shape": [3]}, {**BOX, "shape": [-2]}, {**BOX, "shape": [2.0]},
        {**BOX, "shape": [True, 2]}, {**BOX, "shape": [[2]]}, {**BOX, "shape": 2},
        {**BOX, "dtype": "object"}, {**BOX, "dtype": ["float32"]}, {**BOX, "dtype": "M8[ns]"},
        {**BOX, "high": [1.0, 1e300]}, {**BOX, "high": [1.0, float("nan")]},
        {**BOX, "high": float("inf")}, {**BOX, "high": [1.0, "2"]}, {**BOX, "high": []},
        {**BOX, "low": 5.0}, {**BOX, "dtype": "int8", "high": 300},
        {**BOX, "dtype": "int8", "high": 3.0}, {**BOX, "dtype": "bool", "high": 1},
        {"kind": "Discrete", "n": 10**18, "start": 0, "dtype": "int64"},
        {"kind": "Discrete", "n": 0, "start": 0, "dtype": "int64"},
        {"kind": "Discrete", "n": 2, "start": 10**30, "dtype": "int64"},
        {"kind": "Discrete", "n": 2, "start": 0, "dtype": "float32"},
        {"kind": "MultiDiscrete", "shape": [1], "dtype": "int64", "nvec": [10**9], "start": [0]},
        {"kind": "MultiDiscrete", "shape": [1], "dtype": "int8", "nvec": [500], "start": [0]},
        {"kind": "MultiDiscrete", "shape": [2], "dtype": "int64", "nvec": [2], "start": [0]},
        {"kind": "MultiBinary", "n": 10**10}, {"kind": "MultiBinary", "n": [10**5, 10**5]},
        {"kind": "Dict", "parts": {}}, {"kind": "Dict", "parts": []},
        {"kind": "Dict", "parts": [["a", BOX], ["a", BOX]]}, {"kind": "Dict", "parts": [["a"]]},
        {"kind": "Dict", "parts": [[None, BOX]]}, {"kind": "Dict", "parts": [[["a"], BOX]]},
        {"kind": "Tuple", "parts": [[i, {"kind": "MultiBinary", "n": 4_000_000}] for i in (0, 1)]},
        {"kind": "Tuple", "parts": [[0, BOX]], "depth": 99},
        NESTED,
    ],
    ids=lambda plain: str(plain)[:60],
)  # fmt: skip
def test_what_describes_no_space_is_refused(plain):
    fine = saved(ACTIONS)
    for part in ("observation", "action"):
        with pytest.raises(ValueError, match=r"."):
            read_spaces({**fine, part: plain})


def places(value, path=()):
    """Yield the path of every value inside."""
    yield path
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    for key, item in inner.items() if isinstance(inner, dict) else ():
        yield from places(item, (*path, key))


def changed(plain, path, value):
    *groups, last = path
    whole = plain = deepcopy(plain)
    for key in groups:
        plain = plain[key]
    plain[last] = value
    return whole


WRONG = (None, True, -1, 2**70, 1.5, float("nan"), "", "Box", [], [0], {}, {"kind": "Box"})


@pytest.mark.parametrize("space", DESCRIBED, ids=str)
def test_any_change_is_refused_or_read_as_a_space(space):
    plain = saved(space)
    for path in [path for path in places(plain) if path]:
        for value in WRONG:
            try:
                found, actions, _ = read_spaces(changed(plain, path, value))
            except ValueError:
                continue
            assert isinstance(found, spaces.Space) and isinstance(actions, spaces.Space)
            assert spaces.flatdim(found) <= MOST_ELEMENTS


@pytest.mark.parametrize("axes", [None, "cwh", ["hwc"], 1])
def test_other_image_axes_are_refused(axes):
    with pytest.raises(ValueError, match="axes"):
        read_spaces({**saved(ACTIONS), "image_axes": axes})


@pytest.mark.parametrize("space", COMPOSITE)
def test_parts_are_described_in_the_order_of_the_encoded_vector(space):
    space.seed(0)
    observation, encoder = space.sample(), observation_encoder(space)
    vector = np.zeros(encoder.shape, np.float32)
    encoder.write(observation, vector)
    np.testing.assert_array_equal(vector, spaces.flatten(space, observation))
    begin = 0
    for key, plain in saved(space)["observation"]["parts"]:
        part, *_ = read_spaces({**saved(space), "observation": plain})
        size = spaces.flatdim(part)
        found = vector[begin : (begin := begin + size)]
        np.testing.assert_array_equal(found, spaces.flatten(part, observation[key]))
    assert begin == len(vector)


@pytest.mark.parametrize(
    ("place", "where"),
    [("'arm': 0: element [1, 0]", (1, 0)), ("'arm': 0: element [0, 1]", (0, 1))],
)
def test_an_element_of_a_vector_is_named_by_its_place_in_the_space(place, where):
    boxes = [spaces.Box(-1, 1, (2, 2)), spaces.Box(-1, 1, ())]
    space = spaces.Dict({"gear": spaces.Discrete(3), "arm": spaces.Tuple(boxes)})
    observation, encoder = space.sample(), observation_encoder(space)
    observation["arm"][0][where] = np.nan
    vector = np.zeros(encoder.shape, np.float32)
    encoder.write(observation, vector)
    assert place_in(space, int(np.flatnonzero(np.isnan(vector))[0])) == place


def test_a_single_number_has_no_index():
    assert place_in(spaces.Box(-1, 1, ()), 0) == "it"
    assert place_in(spaces.Box(-1, 1, (5,)), 3) == "element [3]"
