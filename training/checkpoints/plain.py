"""Convert nested plain state to one tensor table and one JSON document, and back."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from steadyrl.core.safe_parsing import from_json

TENSOR, NUMBER = "$tensor", "$number"
LONGEST_DOCUMENT, MOST_VALUES = 64_000_000, 1_000_000  # bytes of JSON, and values in them


def to_document(state: Any) -> tuple[bytes, dict[str, Tensor]]:
    """Return `state` as JSON text and {name: tensor}; ValueError if it could not be read back."""
    tensors: dict[str, Tensor] = {}
    document = _outward(state, tensors, "")
    text = json.dumps(document, allow_nan=False, indent=1).encode()
    _parse(text)
    return text, tensors


def _outward(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(value, Tensor):
        name = path or "value"
        if name in tensors:
            raise ValueError(f"{name}: two tensors have this name")
        tensors[name] = value.detach().to("cpu").contiguous()
        return {TENSOR: name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise ValueError(f"{path or 'state'}: {key!r} cannot be a key of saved state")
        return {key: _outward(item, tensors, _join(path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_outward(item, tensors, _join(path, str(i))) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER: repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{path or 'state'}: {type(value).__name__} is not plain")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def from_document(text: bytes, tensors: dict[str, Tensor]) -> Any:
    """Inverse of `to_document`; ValueError for anything it would not write."""
    try:
        document = _parse(text)
    except ValueError as error:
        raise ValueError(f"is not the JSON it should be: {error}") from None
    return _inward(document, tensors)


def _parse(text: bytes) -> Any:
    """Return the content of a document; ValueError if it is too large, too deep, or not JSON."""
    if len(text) > LONGEST_DOCUMENT:
        raise ValueError(f"holds {len(text):,} bytes of JSON")
    return from_json(text, most=MOST_VALUES, parse_constant=_reject_constant)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _inward(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_inward(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        name = value[TENSOR]
        if len(value) != 1 or not isinstance(name, str) or name not in tensors:
            raise ValueError(f"names a tensor {name!r} that is not there")
        return tensors[name]
    if NUMBER in value:
        number = value[NUMBER]
        if len(value) != 1 or number not in ("nan", "inf", "-inf"):
            raise ValueError(f"names a number {number!r} that is none")
        return float(number)
    return {key: _inward(item, tensors) for key, item in value.items()}


def finite(tensors: dict[str, Tensor]) -> bool:
    """Return whether all floating-point tensors are finite."""
    return all(
        bool(torch.isfinite(tensor).all())
        for tensor in tensors.values()
        if tensor.is_floating_point()
    )


def nbytes_of(state: Any) -> int:
    """Return the total bytes of the tensors in a nested state."""
    if isinstance(state, Tensor):
        return state.nbytes
    inside = state.values() if isinstance(state, dict) else state
    return sum(map(nbytes_of, inside)) if isinstance(state, dict | list | tuple) else 0
