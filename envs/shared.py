"""The memory that the main process and the environments' processes share."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.rows import Rows, row_bytes
from envs.settings import EnvSettings
from envs.slot import EnvSlot
from envs.types import (
    ActionSpec,
    BoxActions,
    DiscreteActions,
    EnvSpec,
    MultiBinaryActions,
    MultiDiscreteActions,
)

NUMBER_BYTES = 8  # the widest number an action consists of
ACTION_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (DiscreteActions, MultiDiscreteActions, MultiBinaryActions, BoxActions)
}


class SharedArrays:
    """Two rows, one action per environment, and each one's progress (episode, is it over)."""

    def __init__(self, spec: EnvSpec, memory: Any) -> None:
        block = np.frombuffer(memory, np.uint8)
        n, row, action = spec.num_envs, row_bytes(spec), NUMBER_BYTES * action_numbers(spec.action)
        parts = np.split(block, np.cumsum([_aligned(row), _aligned(row), _aligned(n * action)]))
        self.rows = (Rows(spec, parts[0][:row]), Rows(spec, parts[1][:row]))
        self._actions = parts[2][: n * action].reshape(n, action)
        self.progress = parts[3].view(np.int64).reshape(n, 2)

    @staticmethod
    def size(spec: EnvSpec) -> int:
        """Return the bytes that all of it takes."""
        actions = spec.num_envs * NUMBER_BYTES * action_numbers(spec.action)
        return 2 * _aligned(row_bytes(spec)) + _aligned(actions) + 16 * spec.num_envs

    def put_actions(self, actions: NDArray[Any]) -> None:
        """Write one action [N, …] per environment."""
        flat = np.ascontiguousarray(actions).view(np.uint8).reshape(len(self._actions), -1)
        self._actions[:, : flat.shape[1]] = flat

    def action(self, index: int, form: ActionForm) -> NDArray[Any]:
        """Return a copy of one environment's action as a batch of one."""
        return form.read(self._actions[index, : form.nbytes])


class ActionForm:
    """The dtype and shape of one action, as text that can be sent."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.nbytes = math.prod(shape) * np.dtype(dtype).itemsize

    @classmethod
    def of(cls, actions: NDArray[Any]) -> ActionForm:
        """Return the form of a batch of actions [N, …]."""
        return cls(actions.dtype.str, actions.shape[1:])

    @classmethod
    def decode(cls, text: bytes) -> ActionForm:
        """Read what `encode` wrote."""
        dtype, shape = json.loads(text)
        return cls(dtype, tuple(shape))

    def encode(self) -> bytes:
        """Write the form as text."""
        return json.dumps([self.dtype, self.shape]).encode()

    def read(self, data: Any) -> NDArray[Any]:
        """Return a copy of actions [T, …] that lie one after the other."""
        actions: NDArray[Any] = np.array(np.frombuffer(data, self.dtype))
        return actions.reshape(-1, *self.shape)

    def matches(self, actions: NDArray[Any]) -> bool:
        """Tell whether a batch [N, …] is of this form."""
        return actions.dtype.str == self.dtype and actions.shape[1:] == self.shape


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def action_numbers(spec: ActionSpec) -> int:
    """Return how many numbers one action consists of."""
    if isinstance(spec, DiscreteActions):
        return 1
    if isinstance(spec, MultiDiscreteActions):
        return len(spec.nvec)
    return spec.n if isinstance(spec, MultiBinaryActions) else len(spec.low)


def describe(slot: EnvSlot) -> bytes:
    """Write down what the environment's spaces are."""
    encoder, action = slot.encoder, slot.decoder.spec
    told = [encoder.shape, encoder.dtype, type(action).__name__, vars(action), slot.spaces]
    return json.dumps(told).encode()


def read_spaces(text: bytes) -> str:
    """Read what the environment's own spaces are called."""
    return str(json.loads(text)[-1])


def read_description(text: bytes, settings: EnvSettings, num_envs: int) -> EnvSpec:
    """Read what `describe` wrote."""
    shape, dtype, kind, values, _ = json.loads(text)
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return EnvSpec(
        id=settings.id,
        num_envs=num_envs,
        frame_shape=tuple(shape),
        dtype=dtype,
        frame_stack=1,
        action=ACTION_KINDS[kind](**values),
    )
