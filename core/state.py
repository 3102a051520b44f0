"""How every part gives and takes its state: plain values, under the names of its attributes.

A class lists the attributes that decide its future; the rest follows from what they are. A part
whose state is more than that (a replay, the environments) writes the two methods itself.
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
    """A part that can be saved and continued: numbers, text, lists, dicts and tensors only.

    What comes back is of the kind, shape and type that is here, finite, and within its limits.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    state_limits: ClassVar[Mapping[str, Limits]] = {}  # of the numbers under some of these names
    optional_in_checkpoint: ClassVar[bool] = False  # a checkpoint may be written without this part

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the future, as plain values of this moment."""
        return {state_key(name): to_plain(getattr(self, name)) for name in self.state_names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; raise ValueError for what does not fit."""
        for name in self.state_names:
            current = getattr(self, name)
            limits = self.state_limits.get(name)
            restored = _restore_key(current, state, state_key(name), type(self).__name__, limits)
            if restored is not current:
                setattr(self, name, restored)


def state_key(name: str) -> str:
    """Return the key that an attribute is saved under."""
    return name.lstrip("_")


def to_plain(value: Any) -> Any:
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
    raise TypeError(f"{type(value).__name__} has no plain state")


def restore(current: Any, saved: Any, limits: Limits | None = None) -> Any:
    """Put a saved value in the place of `current`: in place where it can be, returned where not."""
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
    """Take `saved[key]`, naming the key of whatever does not fit."""
    if not isinstance(saved, Mapping) or key not in saved:
        raise ValueError(f"the saved state of {of} has no {key}")
    try:
        return restore(current, saved[key], limits)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _restore_scalar(current: Any, saved: Any, limits: Limits | None) -> Any:
    """Return `saved`, a plain value that can stand where `current` does."""
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
