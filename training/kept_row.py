"""What is left of a row that a signal cut short, so that the run can go on in its middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from agents.base import Decision
from envs.types import Episode, Step
from memory.state import Stateful, give


class KeptRow(Stateful):
    """A decision and what it led to, not yet observed; mostly there is none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.row: tuple[Decision, Step] | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.row is None:
            return {"row": None}
        decision, step = self.row
        return {"row": {"decision": give(decision), "step": give(step)}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.row = None
        if state["row"] is None:
            return
        decision, step = state["row"]["decision"], dict(state["row"]["step"])
        parts: dict[str, Any] = {
            name: None if tensor is None else tensor.to(self._device)
            for name, tensor in decision.items()
        }
        episodes = tuple(
            Episode(int(each["env"]), float(each["return_"]), int(each["length"]), each["info"])
            for each in step.pop("episodes")
        )
        arrays = {name: tensor.numpy() for name, tensor in step.items()}
        self.row = Decision(**parts), Step(**arrays, episodes=episodes)
