"""A timestep that an interruption left between `receive` and `observe`: saved, then resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.agents.base import Decision
from steadyrl.core.saved_state import FINITE, Limits, Saved, check_limits, length, real, tensor
from steadyrl.core.state import Stateful, to_plain
from steadyrl.envs.encoding.step_buffer import action_layout
from steadyrl.envs.types import DiscreteActions, EnvSpec, Episode, Step


class PendingStep(Stateful):
    """A decision and the step it led to, not yet observed by the agent; mostly there is none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.content: tuple[Decision, Step] | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.content is None:
            return {"content": None}
        decision, step = self.content
        return {"content": {"decision": to_plain(decision), "step": to_plain(step)}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.content = None
        if Saved(state, "pending").raw("content") is None:
            return
        saved = Saved(state, "pending").inside("content")
        self._validate(saved.inside("decision"), saved.inside("step"))
        decision, step = state["content"]["decision"], dict(state["content"]["step"])
        parts: dict[str, Any] = {
            name: None if tensor is None else tensor.to(self._device)
            for name, tensor in decision.items()
        }
        envs = len(step["valid"])
        episodes = tuple(_episode(Saved(each, "episode"), envs) for each in step.pop("episodes"))
        arrays = {name: step[name].numpy() for name in Step._fields if name in step}
        self.content = Decision(**parts), Step(**arrays, episodes=episodes)

    @staticmethod
    def _validate(decision: Saved, step: Saved) -> None:
        """Raise ValueError for other names, types and numbers of environments than a step has."""
        envs = length(step.raw("valid"))
        for name in ("terminated", "truncated", "valid"):
            step.tensor(name, (envs,), torch.bool)
        step.tensor("reward", (envs,), torch.float32)
        if not isinstance(step.raw("episodes"), list):
            raise ValueError("pending.step.episodes: is not a list")
        for name in Decision._fields:
            if decision.raw(name) is not None or name in ("obs", "env_action"):
                numbers = decision.raw(name)
                if not isinstance(numbers, torch.Tensor) or length(numbers) != envs:
                    raise ValueError(f"pending.decision.{name}: is not of {envs} environments")
                check_limits(numbers, FINITE)

    def check_current(self, spec: EnvSpec, observation: NDArray[Any]) -> None:
        """Raise ValueError for a step of other environments than these, at `observation` [N, …]."""
        if self.content is None:
            return
        decision, step = self.content
        dtype, shape = action_layout(spec.action)
        tensor(decision.obs, observation.shape, getattr(torch, spec.dtype))
        sent = tensor(decision.env_action, (len(observation), *shape), decision.env_action.dtype)
        if sent.is_floating_point() != (dtype.kind == "f"):
            raise ValueError(
                f"pending.decision.env_action: saved as {sent.dtype}, here it is {dtype}"
            )
        if isinstance(spec.action, DiscreteActions):
            check_limits(sent, Limits(0, spec.action.n - 1))
        if not np.array_equal(step.obs, observation):
            raise ValueError("pending.step.obs: is not what the environments observe now")


def _episode(saved: Saved, envs: int) -> Episode:
    env, length_ = saved.whole("env", 0, envs - 1), saved.whole("length")
    info = saved.raw("info")
    if not isinstance(info, dict):
        raise ValueError("episode.info: is not a mapping")
    return Episode(env, saved.real("return_"), length_, {k: real(v) for k, v in info.items()})
