"""Greedy actors, in torch or as compiled code on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.agents.base import Actor, Decision
from steadyrl.buffers.memory_layout import send
from steadyrl.core.cuda_graph import CudaGraphed
from steadyrl.core.saved_state import Limits

if TYPE_CHECKING:
    from steadyrl.agents.actors.fused import FusedGreedy
    from steadyrl.agents.engine.cpu.network import Floats
    from steadyrl.agents.engine.cpu.policy import PolicyArrays

Observations = NDArray[Any]  # [N, …]

HOST = torch.device("cpu")

NOISE = Limits(-110, 110)  # bounds of log E, u and z in float32

TIMESTEPS_DRAWN = 256  # random numbers of ε-greedy actors are drawn for a block of timesteps


def obs_to_device(obs: Observations, device: torch.device) -> Tensor:
    """Return observations on the network's device."""
    return torch.from_numpy(obs) if device.type == "cpu" else send(device, obs)[0]


def flatten_obs(obs: Observations) -> Floats:
    """Return observations as contiguous float32 rows [N, D], as compiled code reads them."""
    return np.ascontiguousarray(obs, np.float32).reshape(len(obs), -1)


class GreedyActor(Actor):
    """Take the greedy action; stateless.

    Outputs are computed by `on_host` if given, else by the network on its device. An actor that
    reads a copy of the weights calls `sync_weights` first. `act_many`, if not None, takes greedy
    actions for many timesteps in one compiled call.
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        on_host: Callable[[Observations], Floats] | None,
        device: torch.device,
        choose: Callable[[Tensor], Tensor],
        sync_weights: Callable[[], None] | None = None,
        cuda_graph: bool = False,
        policy_arrays: PolicyArrays | None = None,
    ) -> None:
        plays = cuda_graph and on_host is None
        how: Any = (
            CudaGraphed(self.decide, "a decision", copies_inputs=True) if plays else self.decide
        )
        self._decide: Callable[..., Any] = how
        self.act_many = None if policy_arrays is None else _fused(policy_arrays)
        self._network, self.on_host, self.device = network, on_host, device
        self.sync_weights = sync_weights
        self._choose = choose  # outputs [N, …] → actions [N, …]

    def act(self, obs: Observations, episode_starts: NDArray[np.bool_]) -> Decision:
        """Return the greedy actions for observations [N, …]."""
        if self.on_host is not None:
            if self.sync_weights is not None:
                self.sync_weights()
            action = self._choose(torch.from_numpy(self.on_host(obs)))
            return Decision(torch.from_numpy(obs), action)
        observed = obs_to_device(obs, self.device)
        with torch.inference_mode():
            return Decision(observed, self._decide(observed))

    def decide(self, *inputs: Tensor) -> Tensor:
        """Return the greedy actions [N, …] for the network's inputs, observations first."""
        return self._choose(self._network(*inputs))


def _fused(policy_arrays: PolicyArrays) -> FusedGreedy:
    from steadyrl.agents.actors.fused import FusedGreedy  # imports Numba

    return FusedGreedy(policy_arrays)
