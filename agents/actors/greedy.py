"""Greedy actors, in torch or as compiled code on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.agents.base import Actor, Decision
from steadyrl.buffers.memory_layout import to_device
from steadyrl.core.cuda_graph import CudaGraphed

if TYPE_CHECKING:
    from steadyrl.agents.actors.fused import FusedGreedy
    from steadyrl.agents.engine.cpu.host_weights import HostWeights
    from steadyrl.agents.engine.cpu.network import Floats
    from steadyrl.agents.engine.cpu.policy import PolicyArrays
    from steadyrl.agents.engine.engine import Engine
    from steadyrl.agents.networks.q_network import QNetwork


class GreedyActor(Actor):
    """Take the greedy action; stateless.

    Outputs are computed by `on_host` if given, else by the network on its device. An actor that
    reads a copy of the weights calls `sync_weights` first. `act_many`, if not None, takes greedy
    actions for many timesteps in one compiled call.
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        on_host: Callable[[NDArray[Any]], Floats] | None,
        device: torch.device,
        choose: Callable[[Tensor], Tensor],
        sync_weights: Callable[[], None] | None = None,
        cuda_graph: bool = False,
        policy_arrays: PolicyArrays | None = None,
    ) -> None:
        self._decide: Callable[..., Any] = self.decide
        if cuda_graph and on_host is None:
            self._decide = CudaGraphed(self.decide, "a decision", copies_inputs=True)
        self.act_many = None if policy_arrays is None else _fused(policy_arrays)
        self._network, self.on_host, self.device = network, on_host, device
        self.sync_weights = sync_weights
        self._choose = choose  # outputs [N, …] → actions [N, …]

    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Return the greedy actions for observations [N, …]."""
        if self.on_host is not None:
            if self.sync_weights is not None:
                self.sync_weights()
            action = self._choose(torch.from_numpy(self.on_host(obs)))
            return Decision(torch.from_numpy(obs), action)
        observed = to_device(obs, self.device)
        with torch.inference_mode():
            return Decision(observed, self._decide(observed))

    def decide(self, *inputs: Tensor) -> Tensor:
        """Return the greedy actions [N, …] for the network's inputs, observations first."""
        return self._choose(self._network(*inputs))


def greedy_q_actor(
    network: QNetwork,
    device: torch.device,
    engine: Engine,
    *,
    values: Callable[[Tensor], Tensor] = lambda outputs: outputs,
    host_weights: HostWeights | None = None,
) -> GreedyActor:
    """Return an actor that takes the allowed actions with the highest expected returns.

    `values` maps the network's outputs [B, A, …] to expected returns [B, A].
    """
    masks = network.masks
    if masks is not None:

        def allowed(obs: Tensor, *noise: Tensor) -> Tensor:
            return masks.forbid(values(network(obs, *noise)), obs)

        return GreedyActor(allowed, None, device, lambda q: q.argmax(1))
    read: Any = network if host_weights is None else host_weights.module
    sync_weights = None if host_weights is None else host_weights.sync_weights
    on_host, policy_arrays = engine.policy(read), None
    if on_host is not None:
        from steadyrl.agents.engine.cpu.policy import q_policy_arrays  # imports Numba

        policy_arrays = q_policy_arrays(on_host)
    return GreedyActor(
        network,
        on_host,
        device,
        lambda outputs: values(outputs).argmax(1),
        sync_weights,
        cuda_graph=engine.captures,
        policy_arrays=policy_arrays,
    )


def _fused(policy_arrays: PolicyArrays) -> FusedGreedy:
    from steadyrl.agents.actors.fused import FusedGreedy  # imports Numba

    return FusedGreedy(policy_arrays)
