"""Teachers: a trained policy or a user's object, as one function of observations.

For discrete actions a teacher predicts probabilities [B, n], for other actions the actions
themselves [B, K], in the environment's units. Teachers are stateless and take large batches.
"""

from __future__ import annotations

import re
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
from steadyrl.core.saved_state import Saved
from steadyrl.core.state import Stateful
from steadyrl.envs.types import ActionSpec, BoxActions, DiscreteActions, MultiDiscreteActions

SHA256 = re.compile("([0-9a-f]{64})?")  # empty: of a user's object
LARGEST_DEVIATION = 1e-3  # tolerance of a distribution's sum


class TeacherError(ExpectedError):
    """An unusable teacher, or an unusable prediction of one."""

    exit_code = 2

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"agent.teacher.policy={name}: {reason}")


class Teacher(ABC):
    """Predict actions from observations, deterministically."""

    name: str  # as it was configured
    sees_masks = False  # whether its observations include the action mask
    sha256 = ""  # of a policy's weights

    @abstractmethod
    def predict(self, obs: Tensor) -> Tensor:
        """Return probabilities [B, n], or actions [B, K], for observations [B, …]."""


class PolicyTeacher(Teacher):
    """A trained policy: its action probabilities if it has logits, else its greedy action."""

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
    """A user's object with `act(obs)` on arrays; every result is validated."""

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
        obs.flags.writeable = False  # they are training data
        try:
            outputs = np.asarray(self._act(obs))
        except Exception as error:  # user code
            raise TeacherError(self.name, f"act failed: {with_place(error)}") from error
        if outputs.dtype.kind not in "biuf":
            self._refuse(f"returned dtype {outputs.dtype}, expected numbers")
        if not np.isfinite(outputs).all():
            self._refuse("returned NaN or infinite numbers")
        return outputs

    def _probabilities(self, outputs: NDArray[Any], batch_size: int) -> NDArray[np.float32]:
        assert isinstance(self._action, DiscreteActions)
        n = self._action.n
        if outputs.shape == (batch_size,):
            if outputs.dtype.kind not in "iu" or not ((outputs >= 0) & (outputs < n)).all():
                self._refuse(f"returned actions that are not integers from 0 to {n - 1}")
            action = np.zeros((batch_size, n), np.float32)
            action[np.arange(batch_size), outputs] = 1
            return action
        self._expect(
            outputs,
            (batch_size, n),
            f"actions [{batch_size}] or a distribution [{batch_size}, {n}]",
        )
        sums = outputs.sum(1)
        if outputs.min() < 0 or np.abs(sums - 1).max() > LARGEST_DEVIATION:
            self._refuse("returned probabilities that are negative or do not sum to 1")
        probabilities: NDArray[np.float32] = (outputs / sums[:, None]).astype(np.float32)
        return probabilities

    def _actions(self, outputs: NDArray[Any], batch_size: int) -> NDArray[Any]:
        action = self._action
        if isinstance(action, BoxActions):
            shape = (batch_size, len(action.low))
            self._expect(outputs, shape, f"actions {list(shape)}")
            return outputs.astype(np.float32)
        many = isinstance(action, MultiDiscreteActions)
        most = np.array(action.nvec if isinstance(action, MultiDiscreteActions) else [2] * action.n)
        self._expect(outputs, (batch_size, len(most)), f"actions {[batch_size, len(most)]}")
        if not ((outputs >= 0) & (outputs < most) & (outputs == np.floor(outputs))).all():
            self._refuse("returned actions outside of the environment's action space")
        return outputs.astype(np.int64 if many else np.int8)

    def _expect(self, outputs: NDArray[Any], shape: tuple[int, ...], what: str) -> None:
        if outputs.shape != shape:
            self._refuse(f"returned shape {list(outputs.shape)}, expected {what}")

    def _refuse(self, what: str) -> None:
        raise TeacherError(self.name, what)


class TeacherGuide(Stateful):
    """Adapt a teacher to the student: units, masks, and turns at acting."""

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
        self._turn_rng = np.random.default_rng([seed, 1])  # a stream of its own
        self.teacher_acted: NDArray[np.bool_] = np.zeros(num_envs, dtype=bool)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self._teacher.sha256, **super().state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        known = Saved(state, "teacher_guide").raw("teacher")
        if not (isinstance(known, str) and SHA256.fullmatch(known)):
            raise ValueError("teacher_guide.teacher: not the SHA-256 of a policy's weights")
        if known != self._teacher.sha256:
            reason = "has other weights than when the run began: resume with the same teacher"
            raise TeacherError(self._teacher.name, reason)
        super().load_state_dict(state)

    @property
    def teacher_prob(self) -> float:
        """Probability β that the teacher acts at this step."""
        return self._schedule.at(self._now())

    def write_targets_(self, obs: Tensor, teacher_target: Tensor) -> None:
        """Write the teacher's targets for observations [B, …] into `teacher_target` [B, …]."""
        masks, teacher_obs = self._masks, obs
        if masks is not None and not self._teacher.sees_masks:
            teacher_obs = masks.features(obs)
        outputs = self._teacher.predict(teacher_obs)
        if isinstance(self._head, BoxHead):
            outputs = self._head.from_env(outputs)
        if outputs.shape != teacher_target.shape:
            reason = f"returned shape {list(outputs.shape)}, expected {list(teacher_target.shape)}"
            raise TeacherError(self._teacher.name, reason)
        teacher_target.copy_(
            outputs if masks is None else renormalize_allowed(outputs, masks.allowed(obs))
        )

    def write_targets_chunked_(self, obs: Tensor, teacher_target: Tensor, size: int) -> None:
        """Write targets for any number of observations, `size` at a time."""
        for teacher_obs, outputs in zip(obs.split(size), teacher_target.split(size), strict=True):
            self.write_targets_(teacher_obs, outputs)

    def actions(self, obs: Tensor) -> Tensor:
        """Return the teacher's actions [N, …] in the policy's units; the mode if categorical."""
        teacher_target = allocate_teacher_target(self._head, len(obs), obs.device)
        self.write_targets_(obs, teacher_target)
        return teacher_target.argmax(-1) if is_categorical(self._head) else teacher_target

    def sample_teacher_mask(self) -> NDArray[np.bool_]:
        """Sample in which environments [N] the teacher acts."""
        prob = self.teacher_prob
        if prob > 0:
            self.teacher_acted[...] = self._turn_rng.random(len(self.teacher_acted)) < prob
        else:
            self.teacher_acted[...] = False
        return self.teacher_acted


class TeacherGuidedActor(Actor):
    """Take the teacher's action where it is the teacher's turn, else the student's.

    The student's random streams advance at every step as if it acted alone. This actor's state
    belongs to the agent.
    """

    def __init__(self, student: Actor, teacher_guide: TeacherGuide, head: Head) -> None:
        self._student, self._teacher_guide, self._head = student, teacher_guide, head

    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Return the actions for observations [N, …]."""
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
    """Return probabilities [B, n] renormalised over allowed actions, uniform if those were all 0.

    Zeros where nothing is allowed, as after the end of an episode: no target.
    """
    left = torch.where(allowed, outputs, 0.0)
    some = left.sum(1, keepdim=True)
    alike = allowed / allowed.sum(1, keepdim=True).clamp(min=1)
    return torch.where(some > 0, left / some, alike)


def is_categorical(head: Head) -> bool:
    """Return whether there is one discrete action, so that targets are probabilities."""
    return type(head) is DiscreteHead


def teacher_target_spec(head: Head) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of one teacher target."""
    if is_categorical(head):
        return (head.size,), torch.float32
    return head.action_shape, head.action_dtype


def allocate_teacher_target(head: Head, batch_size: int, device: torch.device) -> Tensor:
    """Allocate teacher targets for `batch_size` samples."""
    shape, dtype = teacher_target_spec(head)
    return prefaulted((batch_size, *shape), dtype, device)
