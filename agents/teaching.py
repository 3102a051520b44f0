"""What the agents have of a teacher: what it tells of rows, and its turns at acting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from agents.base import Actor, Decision
from agents.heads import BoxHead, DiscreteHead, Head
from agents.masking import Masks
from agents.schedules import Schedule
from agents.teacher import Teacher, TeacherError
from buffers.rollout import touched
from memory.state import Stateful


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
    return touched((rows, *shape), dtype, device)
