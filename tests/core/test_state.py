"""State dicts are plain snapshots; loading one restores the object in place."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from steadyrl.core.state import Stateful, restore, state_key, to_plain


class Moments(NamedTuple):
    mean: torch.Tensor
    steps: int


class Inner(Stateful):
    state_names = ("count",)

    def __init__(self, count):
        self.count = count


class Special(Stateful):
    """An object with its own state_dict."""

    def __init__(self, items):
        self.rows = items

    def state_dict(self):
        return {"length": len(self.rows)}

    def load_state_dict(self, state):
        self.rows = list(range(state["length"]))


def of_kind(kind, fresh):
    """Return a value of one kind, fresh or changed."""
    rng = np.random.Generator(np.random.PCG64(0 if fresh else 9))
    generator = torch.Generator().manual_seed(0 if fresh else 9)
    n = 0 if fresh else 3
    return {
        "int": n,
        "float": n / 7,
        "bool": not fresh,
        "text": "b" * n,
        "none": None if fresh else 1,
        "list": [n] * n,
        "array": np.full((2, 3), n, dtype=np.float32),
        "flags": np.full(4, not fresh),
        "tensor": torch.full((2, 3), float(n)),
        "parameter": torch.nn.Parameter(torch.full((2,), float(n))),
        "numpy_generator": rng,
        "torch_generator": generator,
        "named_tuple": Moments(torch.full((2,), float(n)), n),
        "dict": {"a": torch.full((1,), float(n)), "b": n},
        "part": Inner(n),
        "special": Special(list(range(n))),
        "parts": {"one": Inner(n), "two": Inner(n + 1)},
    }[kind]


KINDS = (
    *("int", "float", "bool", "text", "none", "list", "array", "flags", "tensor", "parameter"),
    *("numpy_generator", "torch_generator", "named_tuple", "dict", "part", "special", "parts"),
)


class Holder(Stateful):
    state_names = ("_value",)

    def __init__(self, value):
        self._value = value


def plain(x):
    """Return whether x consists of types that a checkpoint can hold."""
    if isinstance(x, dict):
        return all(isinstance(key, str) and plain(item) for key, item in x.items())
    if isinstance(x, list):
        return all(plain(item) for item in x)
    return x is None or type(x) in (bool, int, float, str, torch.Tensor)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_value_is_restored(kind):
    one, other = Holder(of_kind(kind, fresh=False)), Holder(of_kind(kind, fresh=True))
    state = one.state_dict()
    assert list(state) == ["value"]
    assert plain(state)
    assert not same(other.state_dict(), state)
    other.load_state_dict(state)
    assert same(other.state_dict(), state)
    assert type(other._value) is type(one._value)


@pytest.mark.parametrize("kind", ["array", "tensor", "parameter", "dict", "named_tuple", "part"])
def test_a_state_is_a_snapshot(kind):
    value = of_kind(kind, fresh=False)
    part = Holder(value)
    state = part.state_dict()
    before = to_plain(state)
    for inner in value.values() if isinstance(value, dict) else [value]:
        if isinstance(inner, np.ndarray):
            inner[...] = 77
        elif isinstance(inner, torch.Tensor):
            inner.data.fill_(77)
    if kind == "named_tuple":
        value.mean.fill_(77)
    if kind == "part":
        value.count = 77
    assert not same(part.state_dict(), before)
    assert same(state, before)


@pytest.mark.parametrize("kind", ["array", "tensor", "parameter", "numpy_generator", "part"])
def test_arrays_tensors_and_generators_are_restored_in_place(kind):
    part = Holder(of_kind(kind, fresh=True))
    before_loading = part._value
    part.load_state_dict(Holder(of_kind(kind, fresh=False)).state_dict())
    assert part._value is before_loading


def test_tensors_inside_tuples_and_dicts_are_restored_in_place():
    for kind, inner in (("named_tuple", lambda v: v.mean), ("dict", lambda v: v["a"])):
        part = Holder(of_kind(kind, fresh=True))
        before_loading = inner(part._value)
        part.load_state_dict(Holder(of_kind(kind, fresh=False)).state_dict())
        assert inner(part._value) is before_loading
        assert (before_loading == 3).all()


@pytest.mark.parametrize("kind", ["numpy_generator", "torch_generator"])
def test_a_restored_generator_draws_the_same(kind):
    def draw(generator):
        if isinstance(generator, torch.Generator):
            return torch.rand(4, generator=generator).tolist()
        return generator.random(4).tolist()

    one, other = Holder(of_kind(kind, fresh=False)), Holder(of_kind(kind, fresh=True))
    draw(one._value)
    state = one.state_dict()
    expected = draw(one._value)
    other.load_state_dict(state)
    assert draw(other._value) == expected


def test_gradients_are_not_part_of_a_state():
    parameter = torch.nn.Parameter(torch.ones(2))
    (parameter * 2).sum().backward()
    state = Holder(parameter).state_dict()
    assert not state["value"].requires_grad
    assert state["value"].grad is None


@pytest.mark.parametrize("kind", ["array", "tensor", "parameter"])
def test_another_shape_is_rejected_by_name_without_changes(kind):
    part = Holder(of_kind(kind, fresh=True))
    before = part.state_dict()
    with pytest.raises(ValueError, match=r"value: saved with shape \[5\], here it is \[2"):
        part.load_state_dict({"value": torch.ones(5)})
    assert same(part.state_dict(), before)


def test_a_missing_key_is_named_with_its_class():
    with pytest.raises(ValueError, match="saved state of Holder has no value"):
        Holder(1).load_state_dict({"other": 2})
    with pytest.raises(ValueError, match=r"value: .*Inner has no count"):
        Holder(Inner(1)).load_state_dict({"value": {}})


@pytest.mark.parametrize("kind", ["dict", "named_tuple"])
def test_a_missing_nested_key_is_named(kind):
    with pytest.raises(ValueError, match=r"value: .* has no (a|mean)$"):
        Holder(of_kind(kind, fresh=True)).load_state_dict({"value": {"b": 1, "steps": 1}})


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_number_in_place_of_a_tensor_is_rejected(kind):
    with pytest.raises(ValueError, match="value: "):
        Holder(of_kind(kind, fresh=True)).load_state_dict({"value": 3})


def test_state_keys_drop_the_leading_underscore():
    assert state_key("_learner") == "learner"
    assert state_key("updates") == "updates"


def test_restore_returns_immutable_values():
    assert restore(1, 5) == 5
    assert restore([1], [2, 3]) == [2, 3]


def test_numpy_scalars_become_python_numbers():
    state = Holder({"count": np.int64(3), "mean": np.float64(0.5)}).state_dict()
    assert plain(state)
    assert state == {"value": {"count": 3, "mean": 0.5}}


def test_unsupported_objects_are_rejected_when_saving():
    with pytest.raises(TypeError, match="object cannot be saved as plain values"):
        Holder(object()).state_dict()
