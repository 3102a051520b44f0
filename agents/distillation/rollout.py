"""Rollouts beside whose rows stands what a teacher says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.rollout.buffer import RolloutBuffer, prefaulted
from steadyrl.buffers.rollout.sequences import SequenceRollout
from steadyrl.core.saved import Saved


class TaughtBatch(NamedTuple):
    """A `RolloutBatch`, what the teacher says of its rows, and which are the policy's own."""

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    return_: Tensor
    lesson: Tensor  # [M, …]
    own: Tensor  # [M] bool: the action taken was the policy's, not the teacher's


class TaughtSequences(NamedTuple):
    """A `SequenceBatch` likewise."""

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    return_: Tensor
    lesson: Tensor
    own: Tensor
    loss_mask: Tensor
    starts: Tensor
    carry: Tensor


class TaughtRollout(RolloutBuffer):
    """A rollout with lessons [T, N, …] and whose action was taken [T, N]."""

    def __init__(
        self, *, lesson_shape: tuple[int, ...], lesson_dtype: torch.dtype, **rows: Any
    ) -> None:
        """Make room for what the teacher says of all rows; its bytes are among those `beside`."""
        super().__init__(**rows)
        every, device = tuple(self.reward.shape), rows["device"]
        self.lesson = prefaulted((*every, *lesson_shape), lesson_dtype, device)
        self.own = prefaulted(every, torch.bool, device).fill_(True)

    @override
    def flat(self) -> TaughtBatch:  # type: ignore[override]
        return TaughtBatch(*super().flat(), self.lesson.flatten(0, 1), self.own.flatten())

    @override
    def clear(self) -> None:
        super().clear()
        self.own.fill_(True)

    @override
    def state_dict(self) -> dict[str, Any]:
        t = self.position
        return {"lesson": self.lesson[:t], "own": self.own[:t], **super().state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name in ("lesson", "own"):
            self._load_steps(Saved(state, "rollout"), name, self.position)


class TaughtSequenceRollout(TaughtRollout, SequenceRollout):
    """The same, learned from in whole sequences."""

    batch_type = TaughtSequences
