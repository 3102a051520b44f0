"""A copy of a network's weights on the host, for actors there while a device learns.

For the few observations of one timestep, a small network runs faster as compiled code on the host
than a device can answer. Weights are copied when they have changed: once per burst of updates.
Which side is faster is measured at the start of a run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.buffers.memory_layout import HOST, send
from steadyrl.core.cuda_graph import host_sees
from steadyrl.core.gates.torch_private import versions

log = logging.getLogger("steadyrl")
CALLS, WARM_UP = 21, 5


class HostWeights:
    """A copy of a network on the host."""

    def __init__(self, network: FlatNetwork, updates: Callable[[], int]) -> None:
        """Copy a network; `updates` counts its updates."""
        self._network, self._updates = network, updates
        self._copy = FlatNetwork(deepcopy(network.module), HOST, learns=False)
        self.module = self._copy.module
        self._seen: tuple[object, ...] = ()
        self._versions = versions()
        self.sync_weights()

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Copy the weights if they changed since the last call; that synchronises the device."""
        there, here = self._network, self._copy
        buffers = there.buffers
        # Graphs and collectives do not increase versions: updates and broadcasts are counted.
        tensors = (there.weights, *buffers.values())
        now = (self._updates(), there.broadcasts, *self._versions(tensors))
        if now == self._seen:
            return
        self._seen = now
        here.weights.copy_(there.weights)
        for name, buffer in here.buffers.items():
            buffer.copy_(buffers[name])

    def copy(self) -> None:
        """Copy the weights unconditionally."""
        self._seen = ()
        self.sync_weights()


def is_faster_on_host(
    host_weights: HostWeights,
    on_host: Callable[[], object],
    on_device: Callable[[], object],
    *,
    copy_interval: float,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Measure where acting is faster, copying weights every `copy_interval` timesteps."""
    if torch.are_deterministic_algorithms_enabled():
        return True  # results must not depend on timings
    here = seconds(on_host, clock) + seconds(host_weights.copy, clock) / max(copy_interval, 1.0)
    there = seconds(on_device, clock)
    log.info(
        "acting on the %s: a step takes %.0f µs on the host, %.0f µs on the device",
        "host" if here <= there else "device",
        here * 1e6,
        there * 1e6,
    )
    return here <= there


def seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the median duration of a call after warming up."""
    for _ in range(WARM_UP):
        call()
    taken = []
    for _ in range(CALLS):
        begin = clock()
        call()
        taken.append(clock() - begin)
    return median(taken)


def build_host_weights(
    network: FlatNetwork,
    updates: Callable[[], int],
    builders: tuple[Callable[[Any], Callable[[Any], object] | None], Callable[[Any], Tensor]],
    obs: NDArray[Any],
    *,
    copy_interval: float,
) -> HostWeights | None:
    """Return host weights if acting on observations like obs [N, …] is faster on the host.

    `builders` build the function that acts on the host from the copy (None: not supported),
    and the one on the device. Weights are copied every `copy_interval` timesteps.
    """
    if host_sees(network.weights):
        return None
    device = network.weights.device
    host_weights = HostWeights(network, updates)
    on_host = builders[0](host_weights.module)
    if on_host is None:
        return None

    def there() -> object:
        with torch.inference_mode():
            return builders[1](send(device, obs)[0]).numpy(force=True)

    return (
        host_weights
        if is_faster_on_host(host_weights, lambda: on_host(obs), there, copy_interval=copy_interval)
        else None
    )
