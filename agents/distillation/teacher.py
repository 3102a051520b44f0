"""Who teaches: a finished policy, or somebody's object, as one function of observations.

For one choice out of n it tells how likely each is [B, n], for other actions what to do [B, K], in
the environment's units. It is asked for many rows at once, and keeps nothing of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.learner.schedules import Schedule
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.distributions import BoxHead, DiscreteHead, Head
from steadyrl.buffers.rollout.buffer import prefaulted
from steadyrl.core.errors import ExpectedError, with_place
from steadyrl.core.state import Stateful
from steadyrl.envs.types import ActionSpec, BoxActions, DiscreteActions, MultiDiscreteActions

LARGEST_DEVIATION = 1e-3  # of a distribution's sum from 1


class TeacherError(ExpectedError):
    """Refuse a teacher, or what it said."""

    exit_code = 2

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"agent.teacher.policy={name}: {reason}")


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


class Teaching(Stateful):
    """A teacher in a student's units, and by whom each environment's last action was chosen."""

    state_names: ClassVar[tuple[str, ...]] = ("_coins", "led")

    def __init__(
        self,
        teacher: Teacher,
        head: Head,
        share: Schedule,
        *,
        num_envs: int,
        seed: int,
        now: Callable[[], int],
        masks: Masks | None = None,
    ) -> None:
        self._teacher, self._head, self._share, self._now = teacher, head, share, now
        self._masks = masks
        self._coins = np.random.default_rng([seed, 1])  # of nobody else
        self.led: NDArray[np.bool_] = np.zeros(num_envs, dtype=bool)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self._teacher.sha256, **super().state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["teacher"] != self._teacher.sha256:
            reason = "has other weights than when the run began; it is continued with the same only"
            raise TeacherError(self._teacher.name, reason)
        super().load_state_dict(state)

    @property
    def share(self) -> float:
        """β: how likely the teacher's action is taken at this step."""
        return self._share.at(self._now())

    def tell_(self, obs: Tensor, lesson: Tensor) -> None:
        """Write what the teacher says of observations [B, …] into `lesson` [B, …]."""
        masks, seen = self._masks, obs
        if masks is not None and not self._teacher.sees_masks:
            seen = masks.seen(obs)
        told = self._teacher.tell(seen)
        if isinstance(self._head, BoxHead):
            told = self._head.meant(told)
        if told.shape != lesson.shape:
            reason = f"gave shape {list(told.shape)} in place of {list(lesson.shape)}"
            raise TeacherError(self._teacher.name, reason)
        lesson.copy_(told if masks is None else of_allowed(told, masks.allowed(obs)))

    def tell_all_(self, obs: Tensor, lesson: Tensor, piece: int) -> None:
        """Do the same for any number of rows, so many at a time."""
        for seen, told in zip(obs.split(piece), lesson.split(piece), strict=True):
            self.tell_(seen, told)

    def chosen(self, obs: Tensor) -> Tensor:
        """Return the teacher's actions [N, …], in the policy's units; of a choice the likeliest."""
        lesson = empty_lesson(self._head, len(obs), obs.device)
        self.tell_(obs, lesson)
        return lesson.argmax(-1) if is_choice(self._head) else lesson

    def toss(self) -> NDArray[np.bool_]:
        """Draw for which environments [N] it is the teacher's turn."""
        share = self.share
        if share > 0:
            self.led[...] = self._coins.random(len(self.led)) < share
        else:
            self.led[...] = False
        return self.led


class Led(Actor):
    """Takes the teacher's action where it is its turn, else the student's own.

    What the student draws with goes on as if nobody led it. Its state is the agent's.
    """

    def __init__(self, student: Actor, teaching: Teaching, head: Head) -> None:
        self._student, self._teaching, self._head = student, teaching, head

    def act(self, obs: NDArray[Any], starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        decision = self._student.act(obs, starts)
        led = self._teaching.toss()
        if not led.any():
            return decision
        own = decision.action if decision.chosen is None else decision.chosen
        theirs = self._teaching.chosen(decision.obs).to(own.device)
        turns = torch.from_numpy(led).to(own.device).view(-1, *(1 for _ in own.shape[1:]))
        chosen = torch.where(turns, theirs, own)
        kept = None if decision.chosen is None else chosen
        return decision._replace(action=self._head.sent(chosen), chosen=kept)


def of_allowed(told: Tensor, allowed: Tensor) -> Tensor:
    """Return how likely each action [B, n] is among the allowed ones; if none of them was, alike.

    Where nothing is allowed, because an episode is over, nobody is taught: all are 0.
    """
    left = torch.where(allowed, told, 0.0)
    some = left.sum(1, keepdim=True)
    alike = allowed / allowed.sum(1, keepdim=True).clamp(min=1)
    return torch.where(some > 0, left / some, alike)


def is_choice(head: Head) -> bool:
    """Tell whether an action is one choice out of n, so that a lesson is a distribution."""
    return type(head) is DiscreteHead


def lesson_of(head: Head) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the type of what a teacher says of one row."""
    if is_choice(head):
        return (head.size,), torch.float32
    return head.action_shape, head.action_dtype


def empty_lesson(head: Head, rows: int, device: torch.device) -> Tensor:
    """Return room for what a teacher says of so many rows."""
    shape, dtype = lesson_of(head)
    return prefaulted((rows, *shape), dtype, device)
