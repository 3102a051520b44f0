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
            key = key_of(name)
            if key not in state:
                raise ValueError(f"the saved state of {type(self).__name__} has no {key}")
            current = getattr(self, name)
            try:
                taken = take(current, state[key])
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
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
    return value


def take(current: Any, saved: Any) -> Any:
    """Put a saved value in the place of `current`: in place where it can be, returned where not."""
    import torch

    if isinstance(current, Stateful):
        current.load_state_dict(saved)
    elif isinstance(current, torch.Tensor):
        _refuse_other_shape(current.shape, saved.shape)
        with torch.no_grad():
            current.copy_(saved)
    elif isinstance(current, np.ndarray):
        _refuse_other_shape(current.shape, saved.shape)
        current[...] = saved.numpy(force=True)
    elif isinstance(current, np.random.Generator):
        current.bit_generator.state = saved
    elif isinstance(current, torch.Generator):
        current.set_state(saved)
    elif isinstance(current, tuple) and hasattr(current, "_asdict"):
        return type(current)(
            **{key: take(item, saved[key]) for key, item in current._asdict().items()}
        )
    elif isinstance(current, dict):
        for key in current:
            current[key] = take(current[key], saved[key])
    else:
        return saved
    return current


def _refuse_other_shape(here: Any, saved: Any) -> None:
    if tuple(here) != tuple(saved):
        raise ValueError(f"saved with shape {list(saved)}, here it is {list(here)}")
