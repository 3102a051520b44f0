"""Act greedily by a network's outputs, in torch or as machine code on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.agents.actors.fused import FusedGreedy
from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.engine.cpu.network import Floats
from steadyrl.agents.engine.cpu.policy import PolicyArrays
from steadyrl.buffers.memory_layout import send
from steadyrl.core.cuda_graph import Recorded
from steadyrl.core.saved import Limits

Observations = NDArray[Any]  # [N, …]

HOST = torch.device("cpu")

NOISE = Limits(-110, 110)  # log E, u and z of float32 are all nearer to 0

TIMESTEPS_DRAWN = 256  # coins are drawn for so many rows at once


def obs_to_device(obs: Observations, device: torch.device) -> Tensor:
    """Return observations where the network is."""
    return torch.from_numpy(obs) if device.type == "cpu" else send(device, obs)[0]


def flatten_obs(obs: Observations) -> Floats:
    """Return observations as compiled code reads them [N, D]."""
    return np.ascontiguousarray(obs, np.float32).reshape(len(obs), -1)


class GreedyActor(Actor):
    """Takes the best action, by what the network puts out; draws nothing and changes nothing.

    The outputs come from `on_host` where there is one, else from the network on its device. What
    reads a copy of the weights says how to `sync_weights` it. Machine code may take the next actions too
    (`act_many`), where it can.
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
        how: Any = Recorded(self.decide, "a decision", copies=True) if plays else self.decide
        self._decide: Callable[..., Any] = how
        self.act_many = None if policy_arrays is None else FusedGreedy(policy_arrays)
        self._network, self.on_host, self.device = network, on_host, device
        self.sync_weights = sync_weights
        self._choose = choose  # actions [N, …] by outputs [N, …]

    def act(self, obs: Observations, episode_starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        if self.on_host is not None:
            if self.sync_weights is not None:
                self.sync_weights()
            action = self._choose(torch.from_numpy(self.on_host(obs)))
            return Decision(torch.from_numpy(obs), action)
        observed = obs_to_device(obs, self.device)
        with torch.inference_mode():
            return Decision(observed, self._decide(observed))

    def decide(self, *inputs: Tensor) -> Tensor:
        """Return the best actions [N, …] for the network's inputs, observations [N, …] first."""
        return self._choose(self._network(*inputs))
