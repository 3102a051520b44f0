"""Torch tensors of simulators, without importing torch: only a module that did has any."""

from __future__ import annotations

import sys
from typing import Any


def torch_types(*names: str) -> tuple[Any, ...]:
    """Return these types of torch, to be used by isinstance; none if nobody imported torch."""
    torch = sys.modules.get("torch")
    return () if torch is None else tuple(getattr(torch, name) for name in names)


def on_host(value: Any) -> Any:
    """Return a tensor of any device as an array; in dicts and tuples, each of them."""
    if isinstance(value, torch_types("Tensor")):
        return value.numpy(force=True)
    if isinstance(value, dict):
        return {key: on_host(part) for key, part in value.items()}
    return tuple(map(on_host, value)) if isinstance(value, tuple) else value
