"""The step that the end of a run leaves half done: a resumed run begins with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.base import Decision
from steadyrl.core.saved_state import FINITE, Limits, Saved, check_limits, length, real, tensor
from steadyrl.core.state import Stateful, to_plain
from steadyrl.envs.encoding.step_buffer import action_layout
from steadyrl.envs.types import DiscreteActions, EnvSpec, Episode, Step


class PendingStep(Stateful):
    """A step that an interruption left between `receive` and `observe`, with its decision.

    A complete run of an agent that updates during steps leaves a decision without a step: if the
    run is resumed for longer, it takes that decision, which precedes the last updates.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.content: tuple[Decision, Step | None] | None = None

    @property
    def received(self) -> tuple[Decision, Step] | None:
        """The pending step with its decision; None if there is none, or only a decision."""
        if self.content is None or self.content[1] is None:
            return None
        return self.content[0], self.content[1]

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
        decision, step = self._decision(saved.inside("decision")), None
        if saved.raw("step") is not None:
            step = _step(saved.inside("step"))
        if step is not None and len(decision.obs) != len(step.valid):
            raise ValueError("pending.decision.obs: is not of as many environments as the step")
        self.content = decision, step

    def _decision(self, saved: Saved) -> Decision:
        envs = length(saved.raw("obs"))
        parts: dict[str, Any] = dict.fromkeys(Decision._fields)
        for name in Decision._fields:
            numbers = saved.raw(name)
            if numbers is not None or name in ("obs", "env_action"):
                if not isinstance(numbers, Tensor) or length(numbers) != envs:
                    raise ValueError(f"pending.decision.{name}: is not of {envs} environments")
                check_limits(numbers, FINITE)
                parts[name] = numbers.to(self._device)
        return Decision(**parts)

    def check_current(self, spec: EnvSpec, observation: NDArray[Any]) -> None:
        """Raise ValueError if it is of other environments than these, at `observation` [N, …]."""
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
        reached = decision.obs.numpy(force=True) if step is None else step.obs
        if not np.array_equal(reached, observation):
            name = "decision" if step is None else "step"
            raise ValueError(f"pending.{name}.obs: is not what the environments observe now")


def _step(saved: Saved) -> Step:
    """Return a saved step; ValueError for other names, types and numbers of environments."""
    obs, episodes = saved.raw("obs"), saved.raw("episodes")
    if not isinstance(obs, Tensor):
        raise ValueError("pending.step.obs: is not a tensor")
    envs = length(obs)
    if not isinstance(episodes, list):
        raise ValueError("pending.step.episodes: is not a list")
    flags = ("terminated", "truncated", "valid")
    return Step(
        obs=obs.numpy(),
        reward=saved.tensor("reward", (envs,), torch.float32).numpy(),
        **{name: saved.tensor(name, (envs,), torch.bool).numpy() for name in flags},
        episodes=tuple(_episode(Saved(each, "episode"), envs) for each in episodes),
    )


def _episode(saved: Saved, envs: int) -> Episode:
    env, length_ = saved.whole("env", 0, envs - 1), saved.whole("length")
    info = saved.raw("info")
    if not isinstance(info, dict):
        raise ValueError("episode.info: is not a mapping")
    return Episode(env, saved.real("return_"), length_, {k: real(v) for k, v in info.items()})
