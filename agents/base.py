"""What every algorithm is to the loop: an agent that learns, and actors that decide for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.precision import Precision
from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.core.errors import SettingError
from steadyrl.core.metrics import Metrics
from steadyrl.core.state import Stateful
from steadyrl.envs.types import BlockResult, EnvSpec, Step, StepMany


class Decision(NamedTuple):
    """What was decided, and on what: everything `observe` needs to store the row."""

    obs: Tensor  # [N, *observation_shape] on the training device
    env_action: Tensor  # [N, …] what the environment is sent
    log_prob: Tensor | None = None  # [N]
    value: Tensor | None = None  # [N]
    raw_action: Tensor | None = None  # [N, …] the action in the policy's own units
    hidden_state: Tensor | None = None  # [N, …] what was remembered of the episode before


PendingStep = tuple[Decision, Step]


class Actor(Stateful, ABC):
    """Decides for one set of N environments, by the weights of this moment.

    It owns what deciding needs: generators, noise, and whatever it carries from row to row.
    """

    @abstractmethod
    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]; `episode_starts` [N] says whose are the first of an episode."""


class Agent(Stateful, ABC):
    """An algorithm: it observes the rows that its actor's decisions led to, and learns when due.

    `can_update_during_step` says that `update` may run while the environments step, because it
    needs earlier steps only.
    """

    can_update_during_step: bool = False
    _learner: Learner
    _comm: Comm = SINGLE_PROCESS
    # What of the state is each rank's own; a new one begins with its own.
    per_rank_state: ClassVar[tuple[str, ...]] = ("actor",)

    @property
    def syncs_this_step(self) -> bool:
        """Whether the steps of all ranks are counted with the row under way, or with a later one.

        Between two such rows no rank waits for another.
        """
        return True

    @property
    def updates(self) -> int:
        """Gradient steps taken."""
        return self._learner.updates

    @property
    def has_pending_updates(self) -> bool:
        """Whether updates that were due at earlier steps are not done, because of a stop."""
        return False

    @property
    def replay(self) -> ReplayBuffer | None:
        """The replay, where there is one; saved in pieces, apart from the rest of the state."""
        return None

    @classmethod
    @abstractmethod
    def policy(cls, settings: Any, spec: EnvSpec, device: torch.device) -> tuple[nn.Module, Actor]:
        """Build the network of a finished policy, its weights not set yet, and who acts by it."""

    @classmethod
    def sampling_policy(
        cls, settings: Any, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
    ) -> tuple[nn.Module, Actor]:
        """Build the same network, and who draws actions by it as in training."""
        raise SettingError("agent.name", settings.name, "has no policy to draw actions from")

    @abstractmethod
    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        """Return who decides for so many environments.

        The one that explores is the agent's own, saved with it. One that does not is new, takes
        the best actions and touches no state of training.
        """

    @abstractmethod
    def observe(self, decision: Decision, step: Step) -> None:
        """Store the row and count its valid steps."""

    def collect_block(
        self, decision: Decision, run: StepMany | None, steps: int
    ) -> BlockResult | None:
        """Finish the row that was decided on, and go on to so many valid steps, in one call.

        It ends sooner where learning is due. None where rows are observed one at a time.
        """
        return None

    @abstractmethod
    def update(self) -> Metrics | None:
        """Do all learning that is due; None when none is.

        What a request to stop cuts short is due again at the next call.
        """

    def scalars(self) -> dict[str, float]:
        """Return the host-side numbers of this moment: schedules and buffer fill."""
        return {}

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors, not copies, that the greedy policy is made of."""
        return self._learner.network.named()

    def nbytes(self) -> dict[str, int]:
        """Return what each large part holds, for the memory plan."""
        return {"networks": self._learner.nbytes}

    @property
    def device(self) -> torch.device:
        """Where updates are computed."""
        return self._learner.network.weights.device

    @property
    def stop(self) -> Stop:
        """What learning obeys."""
        return self._learner.stop

    def set_stop_flag(self, stop: Stop) -> None:
        """Let what is due wait, and `update` return, once the run is to end."""
        self._learner.stop = stop

    def set_precision(self, precision: Precision) -> None:
        """Let updates read networks in this precision; before the first."""
        self._learner.set_precision(precision)

    def attach_comm(self, comm: Comm) -> None:
        """Together: learn with other ranks, each from its own rows, with rank 0's weights."""
        self._comm = comm
        self._learner.attach_comm(comm)

    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        """Go on among another number of ranks, without what had a meaning among those only.

        This one takes over what it can of the states of ranks that are `departed_states`. A replay is empty
        afterwards: it is shared out anew.
        """

    def check_consistency(self, steps: int, pending: PendingStep | None, obs: NDArray[Any]) -> None:
        """Raise ValueError where what was taken back cannot be after so many steps.

        `obs` [N, …] is what the environments show now, and `kept` the row that led to it, if that
        is still to be observed.
        """

    def drop_replay(self) -> None:
        """Go on without what the replay held."""

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the weights of a finished policy, which fit."""
        for name, tensor in self.weights().items():
            tensor.copy_(weights[name])

    @abstractmethod
    def release(self) -> None:
        """Free all buffers and networks; the agent is not used afterwards."""
