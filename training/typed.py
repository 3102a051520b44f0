"""Turn plain values into typed, checked settings; say clearly what does not fit."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from memory.errors import SettingError

T = TypeVar("T")


def nearest(name: str, choices: list[str]) -> str:
    """Return '; did you mean X?' for the nearest choice, or the list of all of them."""
    close = get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(choices)}"


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build a settings dataclass from `values`, naming the full key of whatever is wrong."""
    hints = get_type_hints(cls)
    for key in values:
        if key not in hints:
            known = [path + name for name in hints]
            hint = nearest(path + str(key), known)
            raise SettingError(f"{path}{key}", show(values[key]), f"no such key; {hint}")
    missing = [path + name for name in hints if name not in values]
    if missing:
        raise SettingError(missing[0], "", "is missing")
    converted = {key: convert(hint, values[key], path + key) for key, hint in hints.items()}
    try:
        return cls(**converted)
    except SettingError as error:
        raise SettingError(path + error.field, show(error.value), error.reason) from None


def show(value: Any) -> Any:
    """Write a value as a person would on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ",".join(str(show(item)) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return value


def convert(hint: Any, value: Any, path: str) -> Any:
    """Return `value` as the type `hint` asks for."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingError(path, show(value), "is a group of keys, not a value")
        return build(hint, value, path + ".")  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(hint, value, path)
    if origin is Literal:
        return _choice(hint, value, path)
    if origin is tuple:
        item = get_args(hint)[0]
        if not isinstance(value, list | tuple):
            raise SettingError(path, show(value), f"must be a list of {_name(item)}s")
        return tuple(convert(item, each, path) for each in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise SettingError(path, show(value), "must be a mapping, such as {key: value}")
        return dict(value)
    return _scalar(hint, value, path)


def _name(hint: Any) -> str:
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[hint]


def _union(hint: Any, value: Any, path: str) -> Any:
    members = list(get_args(hint))
    if value is None and type(None) in members:
        return None
    error: SettingError | None = None
    for member in members:
        if member is type(None):
            continue
        try:
            return convert(member, value, path)
        except SettingError as refused:
            error = error or refused
    assert error is not None
    raise error


def _choice(hint: Any, value: Any, path: str) -> Any:
    choices = list(get_args(hint))
    text = show(value) if isinstance(value, bool) else value
    if text in choices:
        return text
    raise SettingError(path, show(value), f"must be one of {', '.join(map(str, choices))}")


def _scalar(hint: type, value: Any, path: str) -> Any:
    refused = SettingError(path, show(value), f"must be a {_name(hint)}")
    if hint is bool or hint is str:
        if not isinstance(value, hint):
            raise refused
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise refused
    try:
        number = float(value)
    except ValueError:
        raise refused from None
    if not math.isfinite(number):
        raise SettingError(path, show(value), "must be finite")
    if hint is float:
        return number
    # 1e6 is a fine way to write a whole number; 1.5 is not one.
    if not number.is_integer():
        raise refused
    return value if isinstance(value, int) else int(number)
