"""Who teaches: a finished policy, or somebody's object, as one function of observations.

For one choice out of n it tells how likely each is [B, n], for other actions what to do [B, K], in
the environment's units. It is asked for many rows at once, and keeps nothing of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from envs.types import ActionSpec, BoxActions, DiscreteActions, MultiDiscreteActions
from memory.errors import ExpectedError, with_place

LARGEST_DEVIATION = 1e-3  # of a distribution's sum from 1


class TeacherError(ExpectedError):
    """Refuse a teacher, or what it said."""

    exit_code = 2

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"agent.teacher={name}: {reason}")


class Teacher(ABC):
    """Tells what it would do; the same for the same observation, whenever it is asked."""

    name: str  # as it was configured
    sees_masks = False  # of allowed actions, behind what it is shown
    sha256 = ""  # of a policy's weights

    @abstractmethod
    def tell(self, obs: Tensor) -> Tensor:
        """Return probabilities [B, n], or actions [B, K], for observations [B, …]."""


class PolicyTeacher(Teacher):
    """A finished policy: its distribution where it has one over choices, else its best action."""

    def __init__(
        self,
        name: str,
        action: ActionSpec,
        outputs: Callable[[Tensor], Tensor],
        *,
        logits: bool,
        sha256: str,
        sees_masks: bool,
    ) -> None:
        self.sha256, self.sees_masks = sha256, sees_masks
        self.name, self._action, self._outputs, self._logits = name, action, outputs, logits

    @override
    @torch.inference_mode()
    def tell(self, obs: Tensor) -> Tensor:
        told = self._outputs(obs)
        if self._logits:
            return told.softmax(-1)
        if isinstance(self._action, DiscreteActions):
            return F.one_hot(told, self._action.n).float()
        return told


class ObjectTeacher(Teacher):
    """An object with `act(obs)`, of arrays; what it gives is checked every time."""

    def __init__(self, name: str, action: ActionSpec, act: Callable[[NDArray[Any]], Any]) -> None:
        self.name, self._action, self._act = name, action, act

    @override
    def tell(self, obs: Tensor) -> Tensor:
        given = self._given(obs.numpy(force=True))
        if isinstance(self._action, DiscreteActions):
            told = self._probabilities(given, len(obs))
        else:
            told = self._actions(given, len(obs))
        return torch.from_numpy(told).to(obs.device)

    def _given(self, obs: NDArray[Any]) -> NDArray[Any]:
        obs = obs.view()
        obs.flags.writeable = False  # they are learned from
        try:
            given = np.asarray(self._act(obs))
        except Exception as error:  # foreign code
            raise TeacherError(self.name, f"act failed: {with_place(error)}") from error
        if given.dtype.kind not in "biuf":
            self._refuse(f"gave {given.dtype}, which are no numbers")
        if not np.isfinite(given).all():
            self._refuse("gave what is not finite (NaN or infinite)")
        return given

    def _probabilities(self, given: NDArray[Any], rows: int) -> NDArray[np.float32]:
        assert isinstance(self._action, DiscreteActions)
        n = self._action.n
        if given.shape == (rows,):
            if given.dtype.kind not in "iu" or not ((given >= 0) & (given < n)).all():
                self._refuse(f"gave actions that are not whole numbers from 0 to {n - 1}")
            chosen = np.zeros((rows, n), np.float32)
            chosen[np.arange(rows), given] = 1
            return chosen
        self._expect(given, (rows, n), f"actions [{rows}] or a distribution [{rows}, {n}]")
        sums = given.sum(1)
        if given.min() < 0 or np.abs(sums - 1).max() > LARGEST_DEVIATION:
            self._refuse("gave a distribution that is negative somewhere or does not sum to 1")
        shares: NDArray[np.float32] = (given / sums[:, None]).astype(np.float32)
        return shares

    def _actions(self, given: NDArray[Any], rows: int) -> NDArray[Any]:
        action = self._action
        if isinstance(action, BoxActions):
            shape = (rows, len(action.low))
            self._expect(given, shape, f"actions {list(shape)}")
            return given.astype(np.float32)
        many = isinstance(action, MultiDiscreteActions)
        most = np.array(action.nvec if isinstance(action, MultiDiscreteActions) else [2] * action.n)
        self._expect(given, (rows, len(most)), f"actions {[rows, len(most)]}")
        if not ((given >= 0) & (given < most) & (given == np.floor(given))).all():
            self._refuse("gave actions that the environment has not")
        return given.astype(np.int64 if many else np.int8)

    def _expect(self, given: NDArray[Any], shape: tuple[int, ...], what: str) -> None:
        if given.shape != shape:
            self._refuse(f"gave shape {list(given.shape)} in place of {what}")

    def _refuse(self, what: str) -> None:
        raise TeacherError(self.name, what)
