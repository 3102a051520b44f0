"""A network's weights on the host, for those who act there while a device learns.

For the few observations of a row, a small network takes less time as machine code on the host than
a device needs to be told of them. Weights are copied when they have changed: once a burst of
updates. From which size on the device is quicker is measured where a run begins, not guessed.
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
from steadyrl.buffers.memory_layout import send
from steadyrl.core.cuda_graph import host_sees

log = logging.getLogger("steadyrl")
HOST = torch.device("cpu")
CALLS, WARM_UP = 21, 5


class HostWeights:
    """A copy of a network on the host."""

    def __init__(self, network: FlatNetwork, updates: Callable[[], int]) -> None:
        """Copy a network whose `updates` are counted."""
        self._network, self._updates = network, updates
        self._copy = FlatNetwork(deepcopy(network.module), HOST)
        self.module = self._copy.module
        self._seen: tuple[int, ...] = ()
        self.sync_weights()

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Copy what has changed since the last call: that waits for the device."""
        there, here = self._network, self._copy
        buffers = there.buffers
        # Steps and broadcasts are counted: what graphs and collectives write counts in no version.
        tensors = (there.weights, *buffers.values())
        now = (self._updates(), there.broadcasts, *(tensor._version for tensor in tensors))
        if now == self._seen:
            return
        self._seen = now
        here.weights.copy_(there.weights)
        for name, buffer in here.buffers.items():
            buffer.copy_(buffers[name])

    def copy(self) -> None:
        """Copy all, changed or not."""
        self._seen = ()
        self.sync_weights()


def is_faster_on_host(
    host_weights: HostWeights,
    on_host: Callable[[], object],
    on_device: Callable[[], object],
    *,
    rows: float,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Measure where a row is decided on sooner, with a copy of the weights every so many `rows`."""
    if torch.are_deterministic_algorithms_enabled():
        return True  # a clock must not decide whose rounding counts
    here = seconds(on_host, clock) + seconds(host_weights.copy, clock) / max(rows, 1.0)
    there = seconds(on_device, clock)
    log.info(
        "acting on the %s: a row takes %.0f µs on the host, %.0f µs on the device",
        "host" if here <= there else "device",
        here * 1e6,
        there * 1e6,
    )
    return here <= there


def seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return what a call takes once it is warm, in the middle of many."""
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
    rows: float,
) -> HostWeights | None:
    """Return a mirror of a network on a device, where rows like obs [N, …] are decided on sooner.

    `builders` build what decides on the host from the copy, if anything does, and what decides on the
    device. Weights are copied every so many `rows`.
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
        if is_faster_on_host(host_weights, lambda: on_host(obs), there, rows=rows)
        else None
    )
