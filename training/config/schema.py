"""Convert plain values to typed, validated settings."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from steadyrl.core.errors import SettingError, nearest, show
from steadyrl.training.config.hints.other_trainers import block_reason, schedule_hint
from steadyrl.training.config.hints.values import list_hint, number_hint

T = TypeVar("T")

NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
PLURALS = {int: "integers", float: "numbers", str: "texts", bool: "trues and falses"}

# ASCII digits only; float() accepts those of other scripts too.
NUMBER = re.compile(r"[+-]?(\d[\d_]*)?\.?(\d[\d_]*)?([eE][+-]?\d+)?|[+-]?(inf|nan)", re.ASCII)
# Upper bounds. int: far below the range of 64-bit counters.
LARGEST = {int: 10**18, float: 3e38}  # float: range of float32


class UnknownKeyError(SettingError):
    """A key that the settings do not have."""


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build a settings dataclass from `values`; errors name the full key."""
    hints = get_type_hints(cls)
    for key in values:
        if key not in hints:
            known = [path + name for name in hints]
            hint = nearest(path + str(key), known)
            raise UnknownKeyError(f"{path}{key}", show(values[key]), f"no such key; {hint}")
    missing = [path + name for name in hints if name not in values]
    if missing:
        raise SettingError(missing[0], "", "is missing")
    converted = {key: convert(hint, values[key], path + key) for key, hint in hints.items()}
    try:
        return cls(**converted)
    except SettingError as error:
        raise SettingError(path + error.field, show(error.value), error.reason) from None


def convert(hint: Any, value: Any, path: str) -> Any:
    """Return `value` converted to the type `hint`."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingError(path, show(value), block_reason(path, show(value)))
        return build(hint, value, path + ".")  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(hint, value, path)
    if origin is Literal:
        return _choice(hint, value, path)
    if origin is tuple:
        item = get_args(hint)[0]
        if not isinstance(value, list | tuple):
            hinted = list_hint(path, value, is_item=_is_convertible(item, value))
            reason = f"must be a list of {PLURALS.get(item, 'values')}{hinted}"
            raise SettingError(path, show(value), reason)
        return tuple(convert(item, each, path) for each in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise SettingError(path, show(value), "must be a mapping, such as {key: value}")
        return dict(value)
    return _scalar(hint, value, path)


def _is_convertible(hint: Any, value: Any) -> bool:
    try:
        convert(hint, value, "")
    except SettingError:
        return False
    return True


def _union(hint: Any, value: Any, path: str) -> Any:
    members = list(get_args(hint))
    if value is None and type(None) in members:
        return None
    refused = []
    for member in members:
        if member is type(None):
            continue
        try:
            return convert(member, value, path)
        except SettingError as error:
            refused.append(error.reason)
    first, *others = refused
    reason = " or ".join([first, *(other.removeprefix("must be ") for other in others)])
    if value in ("None", "none") and type(None) in members:
        reason += "; write null"
    raise SettingError(path, show(value), reason)


def _choice(hint: Any, value: Any, path: str) -> Any:
    choices = list(get_args(hint))
    text = show(value) if isinstance(value, bool) else value
    if text in choices:
        return text
    one_of = "one of " if len(choices) > 1 else ""
    reason = f"must be {one_of}{', '.join(map(str, choices))}{schedule_hint(path, text)}"
    raise SettingError(path, show(value), reason)


def _scalar(hint: type, value: Any, path: str) -> Any:
    quoted = isinstance(value, int | float) and hint is str
    hinted = f""": write '{path}="{show(value)}"'""" if quoted else schedule_hint(path, value)
    if hint in (int, float):
        hinted = hinted or number_hint(path, value)
    reason = f"must be {NAMES[hint]}{hinted}"
    refused = SettingError(path, show(value), reason)
    if hint is bool or hint is str:
        if not isinstance(value, hint):
            raise refused
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise refused
    if isinstance(value, str) and not NUMBER.fullmatch(value):
        raise refused
    try:
        # An int may have hundreds of digits, too many for a float.
        number = value if isinstance(value, int) else float(value)
    except ValueError:
        raise refused from None
    if isinstance(number, float) and not math.isfinite(number):
        raise SettingError(path, show(value), "must be finite")
    if abs(number) > LARGEST[hint]:
        raise SettingError(path, show(value), "is too large")
    # 1e6 is accepted as an integer, 1.5 is not.
    if hint is int and number != int(number):
        raise refused
    return hint(number)
