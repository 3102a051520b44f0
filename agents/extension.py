"""Extensions: what a teacher or RND adds to an algorithm, as hooks that its agent calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from typing_extensions import override

from steadyrl.agents.base import Actor, Agent, Decision
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.learner.loss_spec import LossScalars, LossSpec
from steadyrl.buffers.rollout.buffer import SampleField, batch_type
from steadyrl.core.metrics import Metrics
from steadyrl.core.state import Stateful


class Extension(Stateful):
    """Hooks that an agent calls at fixed points; this base adds nothing.

    Its state is saved with the agent's, under the extension's own keys.
    """

    per_rank_state: tuple[str, ...] = ()  # keys of its state that differ between ranks

    # Building: in this order.

    def rollout_fields(self) -> Mapping[str, SampleField]:
        """Return additional fields of a rollout's samples; batches have them, too."""
        return {}

    def loss_spec(self, spec: LossSpec) -> LossSpec:
        """Return the loss spec with the extension's term."""
        return spec

    def attach(self, parts: Any) -> None:
        """Keep the parts of the agent (`DQNParts`, `PPOParts`) that the extension uses."""

    # Acting and storing.

    def actor(self, actor: Actor) -> Actor:
        """Return the behaviour actor, possibly wrapped."""
        return actor

    def allows_blocks(self) -> bool:
        """Return whether blocks of timesteps may be collected in compiled code now."""
        return True

    def before_storing(self, decision: Decision) -> None:
        """Fill in this extension's fields of the rollout's next timestep."""

    # Updates: from rollouts (`RolloutAgent`).

    def transaction(self) -> AbstractContextManager[None]:
        """Restore what this extension changes in an update if Interrupted is raised inside."""
        return nullcontext()

    def after_targets(self, next_obs: Tensor) -> None:
        """Change a full rollout's advantages or fields.

        `next_obs` [N, …], the observation at t = T, continues `rollout.obs`: it is normalised where
        these are, as in PPO's first rollout, and raw where they are.
        """

    def learning_rate(self, rate: float) -> float:
        """Return the learning rate of the next update; `rate`: by the schedule."""
        return rate

    def after_step(self, rate: float) -> float:
        """Return the learning rate of the next gradient step; `rate`: of the last one."""
        return rate

    def after_epochs(self, metrics: Metrics | None, rate: float) -> Metrics | None:
        """Learn from the rollout at `rate` as well, within the transaction; return all metrics."""
        return metrics

    # Updates: from a replay (DQN).

    def replay_fields(self, batch: Any) -> Mapping[str, Tensor]:
        """Return additional fields [B, …] of a replay batch; the loss reads them by name."""
        return {}

    # What every agent has.

    def loss_scalars(self) -> LossScalars:
        """Return what the loss takes before the algorithm's own scalars."""
        return ()

    def scalars(self) -> dict[str, float]:
        """Return host-side numbers to log."""
        return {}

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of each large part."""
        return {}

    def attach_comm(self, comm: Comm) -> None:
        """Collective: learn with other ranks."""

    def set_stop_flag(self, stop: Stop) -> None:
        """Use this stop flag."""

    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        """Merge the states of ranks that no longer exist."""


def with_fields(batch: Any, fields: Mapping[str, Tensor]) -> Any:
    """Return a batch with additional fields."""
    kind: Any = type(batch)
    return batch_type(kind, *fields, after=len(batch))(*batch, *fields.values())


class ExtensibleAgent(Agent):
    """An agent with extensions, called in order.

    `_flat_parts` are parts whose keys lie among the agent's own in its saved state.
    """

    _flat_parts: tuple[Stateful, ...]
    _extensions: tuple[Extension, ...]

    def _extend(self, parts: Any, extensions: Sequence[Extension], *flat_parts: Stateful) -> None:
        """Attach the extensions to the agent's parts."""
        self._extensions = tuple(extensions)
        self._flat_parts = (*flat_parts, *extensions)
        self.per_rank_state = (
            *self.per_rank_state,
            *(key for extension in extensions for key in extension.per_rank_state),
        )
        for extension in extensions:
            extension.attach(parts)

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for part in self._flat_parts:
            state |= part.state_dict()
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for part in self._flat_parts:
            part.load_state_dict(state)

    @override
    def set_stop_flag(self, stop: Stop) -> None:
        super().set_stop_flag(stop)
        for extension in self._extensions:
            extension.set_stop_flag(stop)

    @override
    def attach_comm(self, comm: Comm) -> None:
        super().attach_comm(comm)
        for extension in self._extensions:
            extension.attach_comm(comm)

    @override
    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        for extension in self._extensions:
            extension.reshard(departed_states)

    @override
    def scalars(self) -> dict[str, float]:
        numbers = super().scalars()
        for extension in self._extensions:
            numbers |= extension.scalars()
        return numbers

    @override
    def nbytes(self) -> dict[str, int]:
        sizes = super().nbytes()
        for extension in self._extensions:
            sizes |= extension.nbytes()
        return sizes

    def _extended_actor(self, actor: Actor) -> Actor:
        """Return the behaviour actor as the extensions wrap it."""
        for extension in self._extensions:
            actor = extension.actor(actor)
        return actor

    def _allows_blocks(self) -> bool:
        """Return whether all extensions allow blocks of timesteps now."""
        return all(extension.allows_blocks() for extension in self._extensions)
