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
    def predict(self, obs: Tensor) -> Tensor:
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
    def predict(self, obs: Tensor) -> Tensor:
        outputs = self._outputs(obs)
        if self._logits:
            return outputs.softmax(-1)
        if isinstance(self._action, DiscreteActions):
            return F.one_hot(outputs, self._action.n).float()
        return outputs


class ObjectTeacher(Teacher):
    """An object with `act(obs)`, of arrays; what it gives is checked every time."""

    def __init__(self, name: str, action: ActionSpec, act: Callable[[NDArray[Any]], Any]) -> None:
        self.name, self._action, self._act = name, action, act

    @override
    def predict(self, obs: Tensor) -> Tensor:
        outputs = self._call(obs.numpy(force=True))
        if isinstance(self._action, DiscreteActions):
            outputs = self._probabilities(outputs, len(obs))
        else:
            outputs = self._actions(outputs, len(obs))
        return torch.from_numpy(outputs).to(obs.device)

    def _call(self, obs: NDArray[Any]) -> NDArray[Any]:
        obs = obs.view()
        obs.flags.writeable = False  # they are learned from
        try:
            outputs = np.asarray(self._act(obs))
        except Exception as error:  # foreign code
            raise TeacherError(self.name, f"act failed: {with_place(error)}") from error
        if outputs.dtype.kind not in "biuf":
            self._refuse(f"gave {outputs.dtype}, which are no numbers")
        if not np.isfinite(outputs).all():
            self._refuse("gave what is not finite (NaN or infinite)")
        return outputs

    def _probabilities(self, outputs: NDArray[Any], rows: int) -> NDArray[np.float32]:
        assert isinstance(self._action, DiscreteActions)
        n = self._action.n
        if outputs.shape == (rows,):
            if outputs.dtype.kind not in "iu" or not ((outputs >= 0) & (outputs < n)).all():
                self._refuse(f"gave actions that are not whole numbers from 0 to {n - 1}")
            action = np.zeros((rows, n), np.float32)
            action[np.arange(rows), outputs] = 1
            return action
        self._expect(outputs, (rows, n), f"actions [{rows}] or a distribution [{rows}, {n}]")
        sums = outputs.sum(1)
        if outputs.min() < 0 or np.abs(sums - 1).max() > LARGEST_DEVIATION:
            self._refuse("gave a distribution that is negative somewhere or does not sum to 1")
        shares: NDArray[np.float32] = (outputs / sums[:, None]).astype(np.float32)
        return shares

    def _actions(self, outputs: NDArray[Any], rows: int) -> NDArray[Any]:
        action = self._action
        if isinstance(action, BoxActions):
            shape = (rows, len(action.low))
            self._expect(outputs, shape, f"actions {list(shape)}")
            return outputs.astype(np.float32)
        many = isinstance(action, MultiDiscreteActions)
        most = np.array(action.nvec if isinstance(action, MultiDiscreteActions) else [2] * action.n)
        self._expect(outputs, (rows, len(most)), f"actions {[rows, len(most)]}")
        if not ((outputs >= 0) & (outputs < most) & (outputs == np.floor(outputs))).all():
            self._refuse("gave actions that the environment has not")
        return outputs.astype(np.int64 if many else np.int8)

    def _expect(self, outputs: NDArray[Any], shape: tuple[int, ...], what: str) -> None:
        if outputs.shape != shape:
            self._refuse(f"gave shape {list(outputs.shape)} in place of {what}")

    def _refuse(self, what: str) -> None:
        raise TeacherError(self.name, what)


class TeacherGuide(Stateful):
    """A teacher in a student's units, and by whom each environment's last action was chosen."""

    state_names: ClassVar[tuple[str, ...]] = ("_turn_rng", "teacher_acted")

    def __init__(
        self,
        teacher: Teacher,
        head: Head,
        schedule: Schedule,
        *,
        num_envs: int,
        seed: int,
        now: Callable[[], int],
        masks: Masks | None = None,
    ) -> None:
        self._teacher, self._head, self._schedule, self._now = teacher, head, schedule, now
        self._masks = masks
        self._turn_rng = np.random.default_rng([seed, 1])  # of nobody else
        self.teacher_acted: NDArray[np.bool_] = np.zeros(num_envs, dtype=bool)

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
    def teacher_prob(self) -> float:
        """β: how likely the teacher's action is taken at this step."""
        return self._schedule.at(self._now())

    def write_targets_(self, obs: Tensor, teacher_target: Tensor) -> None:
        """Write what the teacher says of observations [B, …] into `teacher_target` [B, …]."""
        masks, teacher_obs = self._masks, obs
        if masks is not None and not self._teacher.sees_masks:
            teacher_obs = masks.features(obs)
        outputs = self._teacher.predict(teacher_obs)
        if isinstance(self._head, BoxHead):
            outputs = self._head.from_env(outputs)
        if outputs.shape != teacher_target.shape:
            reason = f"gave shape {list(outputs.shape)} in place of {list(teacher_target.shape)}"
            raise TeacherError(self._teacher.name, reason)
        teacher_target.copy_(
            outputs if masks is None else renormalize_allowed(outputs, masks.allowed(obs))
        )

    def write_targets_chunked_(self, obs: Tensor, teacher_target: Tensor, piece: int) -> None:
        """Do the same for any number of rows, so many at a time."""
        for teacher_obs, outputs in zip(obs.split(piece), teacher_target.split(piece), strict=True):
            self.write_targets_(teacher_obs, outputs)

    def actions(self, obs: Tensor) -> Tensor:
        """Return the teacher's actions [N, …], in the policy's units; of a choice the likeliest."""
        teacher_target = allocate_teacher_target(self._head, len(obs), obs.device)
        self.write_targets_(obs, teacher_target)
        return teacher_target.argmax(-1) if is_categorical(self._head) else teacher_target

    def sample_teacher_mask(self) -> NDArray[np.bool_]:
        """Draw for which environments [N] it is the teacher's turn."""
        prob = self.teacher_prob
        if prob > 0:
            self.teacher_acted[...] = self._turn_rng.random(len(self.teacher_acted)) < prob
        else:
            self.teacher_acted[...] = False
        return self.teacher_acted


class TeacherGuidedActor(Actor):
    """Takes the teacher's action where it is its turn, else the student's own.

    What the student draws with goes on as if nobody led it. Its state is the agent's.
    """

    def __init__(self, student: Actor, teacher_guide: TeacherGuide, head: Head) -> None:
        self._student, self._teacher_guide, self._head = student, teacher_guide, head

    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        decision = self._student.act(obs, episode_starts)
        teacher_acted = self._teacher_guide.sample_teacher_mask()
        if not teacher_acted.any():
            return decision
        student_action = decision.env_action if decision.raw_action is None else decision.raw_action
        teacher_action = self._teacher_guide.actions(decision.obs).to(student_action.device)
        teacher_turn = (
            torch.from_numpy(teacher_acted)
            .to(student_action.device)
            .view(-1, *(1 for _ in student_action.shape[1:]))
        )
        action = torch.where(teacher_turn, teacher_action, student_action)
        raw_action = None if decision.raw_action is None else action
        return decision._replace(env_action=self._head.to_env(action), raw_action=raw_action)


def renormalize_allowed(outputs: Tensor, allowed: Tensor) -> Tensor:
    """Return how likely each action [B, n] is among the allowed ones; if none of them was, alike.

    Where nothing is allowed, because an episode is over, nobody is taught: all are 0.
    """
    left = torch.where(allowed, outputs, 0.0)
    some = left.sum(1, keepdim=True)
    alike = allowed / allowed.sum(1, keepdim=True).clamp(min=1)
    return torch.where(some > 0, left / some, alike)


def is_categorical(head: Head) -> bool:
    """Tell whether an action is one choice out of n, so that a lesson is a distribution."""
    return type(head) is DiscreteHead


def teacher_target_spec(head: Head) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the type of what a teacher says of one row."""
    if is_categorical(head):
        return (head.size,), torch.float32
    return head.action_shape, head.action_dtype


def allocate_teacher_target(head: Head, rows: int, device: torch.device) -> Tensor:
    """Return room for what a teacher says of so many rows."""
    shape, dtype = teacher_target_spec(head)
    return prefaulted((rows, *shape), dtype, device)
