"""A gradient step that several ranks take as one: each its own gradient, then the sum of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steadyrl.agents.engine.inductor import Compiled
from steadyrl.agents.learner.adam import AdamState
from steadyrl.agents.learner.comm import World
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.core.cuda_graph import host_sees


class Together:
    """Stands where the graph of a whole step does, and is cut in two around the one collective.

    The collective stays outside: a graph that holds it would have to be left, at a signal or an
    error, by all ranks in the same replay. With the gradient travel the metrics, and on the host
    whether a rank was asked to stop, so that all stop after the same step.
    """

    def __init__(
        self,
        slope: Callable[..., Any],
        finish: Callable[..., Any],
        world: World,
        stop: Callable[[], Stop],
    ) -> None:
        self._slope, self._finish, self._world, self._stop = slope, finish, world, stop

    def __call__(
        self,
        weights: tuple[Tensor, ...],
        adam: AdamState,
        numbers: tuple[Any, ...],
        batch: Any,
        share: Tensor,
    ) -> tuple[Tensor, ...]:
        """Take the step; return the metrics [K] of all ranks' rows and the reports of these [B]."""
        gradient, values, *reports = self._slope(weights, numbers, batch, share)
        stop = self._stop()
        shared = torch.cat((gradient, values, values.new_full((1,), float(stop.wanted))))
        self._world.sum_(shared)
        rows = len(gradient), len(values), 1
        gradient, values, asked = (part.clone() for part in shared.split(rows))
        if host_sees(asked) and asked.item():
            stop.agree()
        return self._finish(weights[0], gradient, adam, numbers[0], values), *reports

    def build(self, args: tuple[Any, ...]) -> None:
        """Compile both halves for arguments like these, which are left as they are."""
        weights, adam, numbers, batch, share = args
        with self._world.waits():
            if isinstance(self._slope, Compiled):
                self._slope.build((weights, numbers, batch, share))
            if isinstance(self._finish, Compiled):
                # It only looks at what it computes from: a gradient of nothing will do.
                copies = tuple(network.clone() for network in weights)
                gradient, values, *_ = self._slope(copies, numbers, batch, share)
                self._finish.build((weights[0], gradient, adam, numbers[0], values))
