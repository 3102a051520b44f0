"""Act greedily by a network's outputs, in torch or as machine code on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.agents.actors.fused import Chooser
from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.engine.cpu.network import Floats
from steadyrl.agents.engine.cpu.policy import Drawing
from steadyrl.buffers.memory_layout import send
from steadyrl.core.cuda_graph import Recorded
from steadyrl.core.saved import Limits

Observations = NDArray[Any]  # [N, …]

HOST = torch.device("cpu")

NOISE = Limits(-110, 110)  # log E, u and z of float32 are all nearer to 0

ROWS_DRAWN = 256  # coins are drawn for so many rows at once


def on_device(obs: Observations, device: torch.device) -> Tensor:
    """Return observations where the network is."""
    return torch.from_numpy(obs) if device.type == "cpu" else send(device, obs)[0]


def as_rows(obs: Observations) -> Floats:
    """Return observations as compiled code reads them [N, D]."""
    return np.ascontiguousarray(obs, np.float32).reshape(len(obs), -1)


class Greedy(Actor):
    """Takes the best action, by what the network puts out; draws nothing and changes nothing.

    The outputs come from `on_host` where there is one, else from the network on its device. What
    reads a copy of the weights says how to `refresh` it. Machine code may take the next actions too
    (`going_on`), where it can.
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        on_host: Callable[[Observations], Floats] | None,
        device: torch.device,
        choose: Callable[[Tensor], Tensor],
        refresh: Callable[[], None] | None = None,
        recorded: bool = False,
        drawing: Drawing | None = None,
    ) -> None:
        plays = recorded and on_host is None
        how: Any = Recorded(self.decide, "a decision", copies=True) if plays else self.decide
        self._decide: Callable[..., Any] = how
        self.going_on = None if drawing is None else Chooser(drawing)
        self._network, self.on_host, self.device = network, on_host, device
        self.refresh = refresh
        self._choose = choose  # actions [N, …] by outputs [N, …]

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        if self.on_host is not None:
            if self.refresh is not None:
                self.refresh()
            action = self._choose(torch.from_numpy(self.on_host(obs)))
            return Decision(torch.from_numpy(obs), action)
        observed = on_device(obs, self.device)
        with torch.inference_mode():
            return Decision(observed, self._decide(observed))

    def decide(self, *inputs: Tensor) -> Tensor:
        """Return the best actions [N, …] for the network's inputs, observations [N, …] first."""
        return self._choose(self._network(*inputs))
