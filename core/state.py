"""Saving and restoring state: plain values under attribute names.

A class lists its stateful attributes in `state_names`; how each is saved follows from its type.
Classes with more complex state (replay, environments) override the two methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from steadyrl.core.saved_state import (
    ANY_WHOLE,
    FINITE,
    Limits,
    boolean,
    real,
    set_numpy_generator,
    tensor,
    torch_generator,
    whole,
)


class Stateful:
    """Base class with `state_dict` and `load_state_dict` for the attributes in `state_names`.

    State consists of numbers, text, lists, dicts and tensors. Loaded values must have the type,
    shape and dtype of the current ones, be finite and within `state_limits`.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    state_limits: ClassVar[Mapping[str, Limits]] = {}  # ranges of some of these attributes
    optional_in_checkpoint: ClassVar[bool] = False  # checkpoints may be saved without this part

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state as plain values."""
        return {state_key(name): to_plain(getattr(self, name)) for name in self.state_names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise ValueError for values that do not fit."""
        for name in self.state_names:
            current = getattr(self, name)
            limits = self.state_limits.get(name)
            restored = _restore_key(current, state, state_key(name), type(self).__name__, limits)
            if restored is not current:
                setattr(self, name, restored)


def state_key(name: str) -> str:
    """Return the key of an attribute: its name without leading underscores."""
    return name.lstrip("_")


def to_plain(value: Any) -> Any:
    """Return a copy of `value` as plain values (numbers, text, lists, dicts, tensors)."""
    import torch  # here, so that configurations are checked without importing torch

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
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain(value._asdict())
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return _plain(value)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} cannot be saved as plain values")


def restore(current: Any, saved: Any, limits: Limits | None = None) -> Any:
    """Restore a saved value: in place where possible; returns the value to assign."""
    import torch

    if isinstance(current, Stateful):
        if saved is not None or not current.optional_in_checkpoint:
            current.load_state_dict(saved)
    elif isinstance(current, torch.Tensor):
        with torch.no_grad():
            current.copy_(tensor(saved, tuple(current.shape), current.dtype, limits or FINITE))
    elif isinstance(current, np.ndarray):
        dtype = torch.from_numpy(current[:0] if current.ndim else current).dtype
        current[...] = tensor(saved, current.shape, dtype, limits or FINITE).numpy(force=True)
    elif isinstance(current, np.random.Generator):
        set_numpy_generator(current, saved)
    elif isinstance(current, torch.Generator):
        current.set_state(torch_generator(saved, current.get_state()))
    elif isinstance(current, tuple) and hasattr(current, "_asdict"):
        kind = type(current).__name__
        items = current._asdict().items()
        return type(current)(
            **{key: _restore_key(item, saved, key, kind, limits) for key, item in items}
        )
    elif isinstance(current, dict):
        for key in current:
            current[key] = _restore_key(current[key], saved, key, "a mapping", limits)
    else:
        return _restore_scalar(current, saved, limits)
    return current


def _restore_key(current: Any, saved: Any, key: str, of: str, limits: Limits | None) -> Any:
    """Restore `saved[key]`; errors name the key."""
    if not isinstance(saved, Mapping) or key not in saved:
        raise ValueError(f"the saved state of {of} has no {key}")
    try:
        return restore(current, saved[key], limits)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _restore_scalar(current: Any, saved: Any, limits: Limits | None) -> Any:
    """Return the plain value `saved` after checking that it has the type of `current`."""
    if limits is not None and limits.optional:
        return None if saved is None else real(saved, limits)
    if isinstance(current, bool):
        return boolean(saved)
    if isinstance(current, int):
        return whole(saved, limits or ANY_WHOLE)
    if isinstance(current, float):
        return real(saved, limits or FINITE)
    for kinds in ((str,), (list, tuple)):
        if isinstance(current, kinds) and not isinstance(saved, kinds):
            found, here = type(saved).__name__, type(current).__name__
            raise ValueError(f"saved as {found}, here it is {here}")
    return saved
