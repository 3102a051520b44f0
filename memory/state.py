"""How every part gives and takes its state: plain values, under the names of its attributes.

A class lists the attributes that decide its future; the rest follows from what they are. A part
whose state is more than that (a replay, the environments) writes the two methods itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np


class Stateful:
    """A part that can be saved and continued: numbers, text, lists, dicts and tensors only."""

    state_names: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the future, as plain values of this moment."""
        return {key_of(name): give(getattr(self, name)) for name in self.state_names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; raise ValueError for what does not fit."""
        for name in self.state_names:
            current = getattr(self, name)
            taken = _take_inside(current, state, key_of(name), type(self).__name__)
            if taken is not current:
                setattr(self, name, taken)


def key_of(name: str) -> str:
    """Return the key that an attribute is saved under."""
    return name.lstrip("_")


def give(value: Any) -> Any:
    """Return a plain copy of `value`."""
    import torch  # here, so that a configuration is checked without it

    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, Mapping):
        return {key: give(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return give(value._asdict())
    if isinstance(value, list | tuple):
        return [give(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return _plain(value)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no plain state")


def take(current: Any, saved: Any) -> Any:
    """Put a saved value in the place of `current`: in place where it can be, returned where not."""
    import torch

    if isinstance(current, Stateful):
        if saved is not None:  # None: left out on purpose, the part stays as it is
            current.load_state_dict(saved)
    elif isinstance(current, torch.Tensor):
        with torch.no_grad():
            current.copy_(_of_shape(current.shape, saved))
    elif isinstance(current, np.ndarray):
        current[...] = _of_shape(current.shape, saved).numpy(force=True)
    elif isinstance(current, np.random.Generator):
        current.bit_generator.state = saved
    elif isinstance(current, torch.Generator):
        current.set_state(saved)
    elif isinstance(current, tuple) and hasattr(current, "_asdict"):
        kind = type(current).__name__
        items = current._asdict().items()
        return type(current)(**{key: _take_inside(item, saved, key, kind) for key, item in items})
    elif isinstance(current, dict):
        for key in current:
            current[key] = _take_inside(current[key], saved, key, "a mapping")
    else:
        return _of_kind(current, saved)
    return current


def _take_inside(current: Any, saved: Any, key: str, of: str) -> Any:
    """Take `saved[key]`, naming the key of whatever does not fit."""
    if not isinstance(saved, Mapping) or key not in saved:
        raise ValueError(f"the saved state of {of} has no {key}")
    try:
        return take(current, saved[key])
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _of_kind(current: Any, saved: Any) -> Any:
    """Return `saved`, a plain value that can stand where `current` does; None can anywhere."""
    for kinds in ((bool,), (int, float), (str,), (list, tuple)):
        if isinstance(current, kinds) and saved is not None:
            if not isinstance(saved, kinds) or (isinstance(saved, bool) and bool not in kinds):
                found, here = type(saved).__name__, type(current).__name__
                raise ValueError(f"saved as {found}, here it is {here}")
            break
    return saved


def _of_shape(shape: Any, saved: Any) -> Any:
    """Return `saved`, a tensor of this shape."""
    found = list(getattr(saved, "shape", ["not a tensor"]))
    if found != list(shape):
        raise ValueError(f"saved with shape {found}, here it is {list(shape)}")
    return saved
