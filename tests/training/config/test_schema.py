import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from steadyrl.core.errors import SettingError
from steadyrl.training.config.schema import build


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float

    def __post_init__(self):
        if self.rate < 0:
            raise SettingError("rate", self.rate, "must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    flag: bool
    name: str | None
    mode: Literal["false", "true", "auto"]
    threads: Literal["auto"] | int
    sizes: tuple[int, ...]
    extra: dict[str, Any]
    inner: Inner


GOOD = {
    "count": 3,
    "flag": True,
    "name": None,
    "mode": "auto",
    "threads": "auto",
    "sizes": [1, 2],
    "extra": {"a": 1},
    "inner": {"rate": 0.5},
}


def test_nested_settings_are_built():
    built = build(Outer, GOOD)
    assert built.sizes == (1, 2)
    assert built.inner == Inner(rate=0.5)


@pytest.mark.parametrize("value", [1_000_000, 1e6, "1e6", "1_000_000"])
def test_integers_are_read_from_several_notations(value):
    count = build(Outer, GOOD | {"count": value}).count
    assert count == 1_000_000
    assert type(count) is int


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (False, "false"), ("auto", "auto")])
def test_choices_accept_yaml_booleans(value, text):
    assert build(Outer, GOOD | {"mode": value}).mode == text


def test_a_choice_or_integer_accepts_an_integer():
    assert build(Outer, GOOD | {"threads": 2}).threads == 2


@pytest.mark.parametrize(
    ("change", "key", "reason"),
    [
        ({"cout": 1}, "cout", "did you mean count?"),
        ({"inner": {"rat": 1, "rate": 1}}, "inner.rat", "did you mean inner.rate?"),
        ({"count": 1.5}, "count", "integer"),
        ({"count": True}, "count", "integer"),
        ({"count": "x"}, "count", "integer"),
        ({"flag": 1}, "flag", "true or false"),
        ({"mode": "on"}, "mode", "one of false, true, auto"),
        ({"threads": "all"}, "threads", "must be auto or an integer"),
        ({"count": "\u0661"}, "count", "integer"),
        ({"count": " 1"}, "count", "integer"),
        ({"count": 10**400}, "count", "too large"),
        ({"count": 1e30}, "count", "too large"),
        ({"inner": {"rate": 10**400}}, "inner.rate", "too large"),
        ({"inner": {"rate": 1e308}}, "inner.rate", "too large"),
        ({"sizes": 3}, "sizes", "list of integers"),
        ({"sizes": [1, "x"]}, "sizes", "integer"),
        ({"inner": {"rate": math.nan}}, "inner.rate", "finite"),
        ({"inner": {"rate": math.inf}}, "inner.rate", "finite"),
        ({"inner": {"rate": -1.0}}, "inner.rate", "0 or more"),
        ({"inner": 3}, "inner", "group"),
        ({"extra": 3}, "extra", "mapping"),
    ],
)
def test_invalid_values_are_rejected_with_full_key_and_reason(change, key, reason):
    with pytest.raises(SettingError) as error:
        build(Outer, GOOD | change)
    assert error.value.field == key
    assert reason in error.value.reason


def test_a_missing_key_is_named():
    with pytest.raises(SettingError, match=r"inner.rate.*missing"):
        build(Outer, GOOD | {"inner": {}})
