"""The state of a Gymnasium vector environment: saved and restored exactly, or not at all.

It is what the environment and its wrappers give by `state_dict`, or else their attributes: numbers,
text, arrays, tensors and generators, none of which is a part of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from steadyrl.core.saved_state import Limits, Saved, check_limits, real
from steadyrl.core.state import restore, to_plain
from steadyrl.envs.encoding.tensors import on_host, torch_types

NUMPY_SCALARS = np.number, np.bool_  # of which float64 is a float too


def copied_state(env: Any) -> dict[str, Any]:
    """Return copies of the attributes, whose arrays and tensors may be changed in place."""
    return {name: _copied(value) for name, value in _attributes(env).items()}


def saved_state(env: Any, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes as plain values; TypeError or ValueError if one cannot be restored.

    `fresh`: the attributes after the last reset, whose kinds they must still have.
    """
    values = _plain_values(fresh, _attributes(env))
    _taken_each(fresh, values)
    return values


def restore_state(env: Any, fresh: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Set attributes to saved values, after checking that they fit those of a reset."""
    values = _taken_each(fresh, saved)
    for prefix, layer in _layers(env):
        state = {name: values[prefix + name] for name in _state(layer) if prefix + name in values}
        if _gives_state(layer):
            layer.load_state_dict(state)
            continue
        for name, value in state.items():
            setattr(layer, name, value)


def _layers(env: Any) -> Iterator[tuple[str, Any]]:
    """Yield a vector environment and its wrappers, each with a prefix for its attributes' names."""
    prefix = ""
    while isinstance(env, gym.vector.VectorWrapper):
        prefix += "env."
        yield prefix, env
        env = env.env
    yield "", env


def _gives_state(layer: Any) -> bool:
    return hasattr(type(layer), "state_dict") and hasattr(type(layer), "load_state_dict")


def _state(layer: Any) -> Mapping[str, Any]:
    """Return what a vector environment or wrapper gives as its state, else its attributes."""
    found: Mapping[str, Any] = layer.state_dict() if _gives_state(layer) else vars(layer)
    return found


def _attributes(env: Any) -> dict[str, Any]:
    """Return the attributes of a vector environment and its wrappers, without constants."""
    constant = gym.Space, gym.envs.registration.EnvSpec, gym.vector.VectorEnv
    constant += torch_types("device", "dtype")
    return {
        prefix + name: value
        for prefix, layer in _layers(env)
        for name, value in _state(layer).items()
        if not isinstance(value, constant)
    }


def _copied(value: Any) -> Any:
    """Return a copy of an array or tensor, which may be changed in place."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.detach().clone() if isinstance(value, torch_types("Tensor")) else value


def _plain_values(fresh: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    import torch  # slow import

    scalars = int, float, str, type(None), *NUMPY_SCALARS
    kinds: Any = np.ndarray, torch.Tensor, np.random.Generator, torch.Generator, *scalars
    values: dict[str, Any] = {}
    arrays: list[NDArray[Any]] = []
    storages: set[int] = set()  # of tensors: from a device, each becomes an array of its own
    for name, value in attributes.items():
        tensor, kind = isinstance(value, torch.Tensor), type(value).__name__
        if not isinstance(value, kinds):
            raise TypeError(f"attribute {name} is of type {kind}")
        if name not in fresh:
            raise ValueError(f"attribute {name} is not there after a reset")
        if tensor != isinstance(fresh[name], torch.Tensor):
            before = type(fresh[name]).__name__
            raise TypeError(f"attribute {name} is of type {kind}, after a reset of {before}")
        if tensor and value.requires_grad:
            raise ValueError(f"attribute {name} requires a gradient")
        if tensor or isinstance(value, np.ndarray):
            storage = value.untyped_storage().data_ptr() if tensor else 0
            value = on_host(value)
            if storage in storages or any(np.may_share_memory(value, each) for each in arrays):
                raise ValueError(f"attribute {name} is a view, which a copy would not follow")
            arrays.append(value)
            storages |= {storage} - {0}
        scalar = isinstance(value, NUMPY_SCALARS) and not isinstance(value, float)
        values[name] = to_plain(np.asarray(value) if scalar else value)
    return values


def _taken_each(current: Mapping[str, Any], saved: object) -> dict[str, Any]:
    """Return the saved values of all attributes after checking that they fit the current ones."""
    state = Saved(saved, "simulator")
    if isinstance(saved, Mapping) and saved.keys() - current.keys():
        raise ValueError(f"simulator: has no {', '.join(sorted(saved.keys() - current.keys()))}")
    taken: dict[str, Any] = {}
    for name, value in current.items():
        try:
            taken[name] = _taken(value, state.raw(name))
        except ValueError as error:
            raise ValueError(f"simulator.{name}: {error}") from None
    return taken


def _taken(current: Any, saved: Any) -> Any:
    """Return the saved value after checking that it fits the current one."""
    tensor = isinstance(current, torch_types("Tensor"))
    scalar = isinstance(current, NUMPY_SCALARS)
    array = tensor or scalar or isinstance(current, np.ndarray)
    number = isinstance(current, int | float) and not isinstance(current, bool)
    finite = not (number or array) or bool(np.isfinite(on_host(current)).all())
    if array and hasattr(saved, "numpy"):
        # dtype and trailing shape may differ between a reset and a step.
        if saved.ndim != current.ndim or saved.shape[:1] != current.shape[:1]:
            raise ValueError(f"saved with shape {list(saved.shape)}, not {list(current.shape)}")
        check_limits(saved, Limits(finite=finite))
        if tensor:
            return saved.clone().to(current.device)
        return saved.numpy()[()] if scalar else saved.numpy().copy()
    if number and isinstance(saved, float):  # a sum may begin as 0
        return real(saved, Limits(finite=finite))
    if current is None and (saved is None or hasattr(saved, "numpy")):
        return None if saved is None else saved.numpy().copy()
    return restore(current, saved)
