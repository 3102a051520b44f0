"""What is left of a row that a signal cut short, so that the run can go on in its middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.agents.base import Decision
from steadyrl.core.saved import FINITE, Limits, Saved, check_limits, length, real, tensor
from steadyrl.core.state import Stateful, give
from steadyrl.envs.encoding.step_buffer import action_form
from steadyrl.envs.types import DiscreteActions, EnvSpec, Episode, Step


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
        if Saved(state, "kept").raw("row") is None:
            return
        saved = Saved(state, "kept").inside("row")
        self._refuse_unfit(saved.inside("decision"), saved.inside("step"))
        decision, step = state["row"]["decision"], dict(state["row"]["step"])
        parts: dict[str, Any] = {
            name: None if tensor is None else tensor.to(self._device)
            for name, tensor in decision.items()
        }
        envs = len(step["valid"])
        episodes = tuple(_episode(Saved(each, "episode"), envs) for each in step.pop("episodes"))
        arrays = {name: step[name].numpy() for name in Step._fields if name in step}
        self.row = Decision(**parts), Step(**arrays, episodes=episodes)

    @staticmethod
    def _refuse_unfit(decision: Saved, step: Saved) -> None:
        """Refuse what is of no row: other names, kinds and numbers of environments."""
        envs = length(step.raw("valid"))
        for name in ("terminated", "truncated", "valid"):
            step.tensor(name, (envs,), torch.bool)
        step.tensor("reward", (envs,), torch.float32)
        if not isinstance(step.raw("episodes"), list):
            raise ValueError("kept.step.episodes: are no list")
        for name in Decision._fields:
            if decision.raw(name) is not None or name in ("obs", "action"):
                numbers = decision.raw(name)
                if not isinstance(numbers, torch.Tensor) or length(numbers) != envs:
                    raise ValueError(f"kept.decision.{name}: is not of {envs} environments")
                check_limits(numbers, FINITE)

    def check_current(self, spec: EnvSpec, shown: NDArray[Any]) -> None:
        """Refuse a row that is not of these environments, which now show `shown` [N, …]."""
        if self.row is None:
            return
        decision, step = self.row
        dtype, shape = action_form(spec.action)
        tensor(decision.obs, shown.shape, getattr(torch, spec.dtype))
        sent = tensor(decision.action, (len(shown), *shape), decision.action.dtype)
        if sent.is_floating_point() != (dtype.kind == "f"):
            raise ValueError(f"kept.decision.action: saved as {sent.dtype}, here it is {dtype}")
        if isinstance(spec.action, DiscreteActions):
            check_limits(sent, Limits(0, spec.action.n - 1))
        if not np.array_equal(step.obs, shown):
            raise ValueError("kept.step.obs: is not what the environments show")


def _episode(saved: Saved, envs: int) -> Episode:
    env, length_ = saved.whole("env", 0, envs - 1), saved.whole("length")
    info = saved.raw("info")
    if not isinstance(info, dict):
        raise ValueError("episode.info: is no mapping")
    return Episode(env, saved.real("return_"), length_, {k: real(v) for k, v in info.items()})
