"""What every algorithm is to the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

from envs.types import Step
from memory.metrics import Metrics
from memory.state import Stateful


class Decision(NamedTuple):
    """What was decided, and on what: everything `observe` needs to store the row."""

    obs: Tensor  # [N, *observation_shape] on the training device
    action: Tensor  # [N, …] what the environment is sent
    log_prob: Tensor | None = None  # [N]
    value: Tensor | None = None  # [N]
    chosen: Tensor | None = None  # [N, …] the action in the policy's own units


class Agent(Stateful, ABC):
    """An algorithm: it acts, observes the row its action led to, and updates when due.

    `overlaps` says that `update` may run while the environments step, because it does not
    need the row under way.
    """

    overlaps: bool = False
    updates: int  # gradient steps taken

    @abstractmethod
    def act(self, obs: NDArray[Any], *, explore: bool = True) -> Decision:
        """Decide for observations [N, …]; if not explore, greedily and touching no state."""

    @abstractmethod
    def observe(self, decision: Decision, step: Step) -> None:
        """Store the row and count its valid steps."""

    @abstractmethod
    def update(self) -> Metrics | None:
        """Do all learning that is due; None when none is."""

    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """Return the host-side numbers of this moment: schedules and buffer fill."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the tensors, not copies, that the greedy policy is made of."""

    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Return what each large part holds, for the memory plan."""

    @abstractmethod
    def release(self) -> None:
        """Free all buffers and networks; the agent is not used afterwards."""
