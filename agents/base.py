"""The interface between the training loop and every algorithm: agents and their actors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.core.errors import SettingError
from steadyrl.core.metrics import Metrics
from steadyrl.core.state import Stateful
from steadyrl.envs.types import BlockResult, EnvSpec, Step, StepMany

if TYPE_CHECKING:  # a policy that acts needs none of these, nor the compiler that they import
    from steadyrl.agents.learner.interrupt import Stop
    from steadyrl.agents.learner.learner import Learner
    from steadyrl.agents.learner.precision import Precision
    from steadyrl.buffers.replay.buffer import ReplayBuffer


class Decision(NamedTuple):
    """Actions for N environments, and what `observe` stores with them."""

    obs: Tensor  # [N, *observation_shape] on the training device
    env_action: Tensor  # [N, …] sent to the environments
    log_prob: Tensor | None = None  # [N]
    value: Tensor | None = None  # [N]
    raw_action: Tensor | None = None  # [N, …] before rescaling to the environment's bounds
    hidden_state: Tensor | None = None  # [N, …] of a recurrent policy, before this step


DecidedStep = tuple[Decision, Step]  # a timestep, and the decision that led to it


class LearningStart(NamedTuple):
    """When updates begin: at which environment step, what is filled until then, and why."""

    step: int
    fills: str  # "replay" or "rollout"
    reason: str


class LatestLearningStart(LearningStart):
    """When updates begin at the latest: an episode that ends may begin them earlier."""


class Actor(Stateful, ABC):
    """Select actions for one set of N environments with the current weights.

    It owns the state of acting: random generators, noise and recurrent hidden states.
    """

    hidden_state: Tensor | None = None  # [N, …] of a recurrent policy: what it remembers

    @abstractmethod
    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Return actions for observations [N, …]; `episode_starts` [N] marks first observations."""

    @property
    def nbytes(self) -> int:
        """Bytes of noise and hidden states."""
        return 0

    def check_actions(self, action: Tensor) -> None:
        """Raise ValueError if this actor cannot have taken the restored actions [T, N, …]."""

    def check_decision(self, decision: Decision) -> None:
        """Raise ValueError if this actor cannot have made the restored decision."""


class Agent(Stateful, ABC):
    """An algorithm: it observes the steps that its actor's decisions led to and learns when due.

    `can_update_during_step`: whether `update` may run while environments step, because it does
    not use the timestep in progress.
    """

    can_update_during_step: bool = False
    _learner: Learner
    _comm: Comm = SINGLE_PROCESS
    # Parts of the state that differ between ranks; a rank that is added starts with fresh ones.
    per_rank_state: tuple[str, ...] = ("actor",)

    @property
    def syncs_this_step(self) -> bool:
        """Whether ranks all-reduce their step counts at this timestep.

        Between two such timesteps no rank waits for another.
        """
        return True

    @property
    def updates(self) -> int:
        """Gradient steps taken."""
        return self._learner.updates

    @property
    def learning_start(self) -> LearningStart | None:
        """When updates begin, if that is known; environment steps are those of all ranks."""
        return None

    @property
    def has_pending_updates(self) -> bool:
        """Whether an interruption left updates of earlier timesteps undone."""
        return False

    @property
    def replay(self) -> ReplayBuffer | None:
        """The replay buffer, if any; it is saved in blocks, apart from the rest of the state."""
        return None

    @classmethod
    @abstractmethod
    def policy(cls, settings: Any, spec: EnvSpec, device: torch.device) -> tuple[nn.Module, Actor]:
        """Build a policy network with uninitialised weights, and its greedy actor."""

    @classmethod
    def sampling_policy(
        cls, settings: Any, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
    ) -> tuple[nn.Module, Actor]:
        """Build the same network with an actor that samples actions as in training."""
        raise SettingError(
            "agent.name", settings.name, "cannot sample actions: it has greedy actions only"
        )

    @abstractmethod
    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        """Return an actor for `num_envs` environments.

        With `explore`, it is the agent's behaviour actor, whose state is saved with the agent.
        Without, it is a greedy actor that does not touch the state of training.
        """

    @abstractmethod
    def observe(self, decision: Decision, step: Step) -> None:
        """Store one timestep and count its valid steps."""

    def collect_block(
        self, decision: Decision, step_many: StepMany | None, steps: int
    ) -> BlockResult | None:
        """Collect up to `steps` valid steps in one compiled call, the decided timestep included.

        It returns early where an update is due, and None if the agent needs single timesteps.
        """
        return None

    @abstractmethod
    def update(self) -> Metrics | None:
        """Do all updates that are due; return their metrics, or None if there were none.

        Updates that a stop request prevents are due again at the next call.
        """

    def scalars(self) -> dict[str, float]:
        """Return current host-side numbers to log: schedules and replay fill."""
        return {}

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the greedy policy, by name; not copies."""
        return self._learner.network.named()

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of each large part, for the memory plan."""
        return {"networks": self._learner.nbytes}

    def host_nbytes(self) -> dict[str, int]:
        """Return the bytes of each large part that are in host memory."""
        return self.nbytes() if self.device.type == "cpu" else {}

    @property
    def device(self) -> torch.device:
        """The device that updates run on."""
        return self._learner.network.weights.device

    @property
    def stop(self) -> Stop:
        """The flag that stops learning."""
        return self._learner.stop

    def set_stop_flag(self, stop: Stop) -> None:
        """Use this stop flag: `update` returns early once it is confirmed."""
        self._learner.stop = stop

    def set_precision(self, precision: Precision) -> None:
        """Set the precision of updates; call it before the first."""
        self._learner.set_precision(precision)

    def attach_comm(self, comm: Comm) -> None:
        """Collective: train with other ranks, each on its own steps, from rank 0's weights."""
        self._comm = comm
        self._learner.attach_comm(comm)

    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        """Continue with another number of ranks: drop the state that depends on the number.

        `departed_states`, of ranks that no longer exist, are merged where possible. The replay is
        empty afterwards: the caller redistributes it.
        """

    def check_consistency(self, steps: int, pending: DecidedStep | None, obs: NDArray[Any]) -> None:
        """Raise ValueError if the restored state cannot belong to a run after `steps` steps.

        `obs` [N, …] are the environments' current observations, and `pending` is the timestep that
        led to them, if it has not been observed yet.
        """

    def drop_replay(self) -> None:
        """Continue with an empty replay."""

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of a trained policy of the same shape."""
        for name, tensor in self.weights().items():
            tensor.copy_(weights[name])

    def release(self) -> None:
        """Free buffers and networks; the agent must not be used afterwards."""
        vars(self).clear()
