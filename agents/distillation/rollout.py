"""Rollouts with teacher targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.rollout.buffer import RolloutBuffer, prefaulted
from steadyrl.buffers.rollout.sequences import SequenceRollout
from steadyrl.core.saved_state import Saved


class DistilledBatch(NamedTuple):
    """A `RolloutBatch` with teacher targets, and whether the student acted."""

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    return_: Tensor
    teacher_target: Tensor  # [M, …]
    student_acted: Tensor  # [M] bool: the action was the student's, not the teacher's


class DistilledSequences(NamedTuple):
    """A `SequenceBatch` with teacher targets, and whether the student acted."""

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    return_: Tensor
    teacher_target: Tensor
    student_acted: Tensor
    loss_mask: Tensor
    episode_starts: Tensor
    hidden_state: Tensor


class DistilledRollout(RolloutBuffer):
    """A rollout with teacher targets [T, N, …] and `student_acted` [T, N]."""

    def __init__(
        self,
        *,
        teacher_target_shape: tuple[int, ...],
        teacher_target_dtype: torch.dtype,
        **arguments: Any,
    ) -> None:
        """Allocate the teacher targets; their bytes are included in `beside`."""
        super().__init__(**arguments)
        every, device = tuple(self.reward.shape), arguments["device"]
        self.teacher_target = prefaulted(
            (*every, *teacher_target_shape), teacher_target_dtype, device
        )
        self.student_acted = prefaulted(every, torch.bool, device).fill_(True)

    @override
    def flat(self) -> DistilledBatch:  # type: ignore[override]
        return DistilledBatch(
            *super().flat(), self.teacher_target.flatten(0, 1), self.student_acted.flatten()
        )

    @override
    def clear(self) -> None:
        super().clear()
        self.student_acted.fill_(True)

    @override
    def state_dict(self) -> dict[str, Any]:
        t = self.position
        return {
            "teacher_target": self.teacher_target[:t],
            "student_acted": self.student_acted[:t],
            **super().state_dict(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name in ("teacher_target", "student_acted"):
            self._load_steps(Saved(state, "rollout"), name, self.position)


class DistilledSequenceRollout(DistilledRollout, SequenceRollout):
    """The same, for sequences."""

    batch_type = DistilledSequences
