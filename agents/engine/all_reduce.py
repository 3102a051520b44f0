"""A gradient step of several ranks: local gradients, one all-reduce, the same update everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.learner.optimizers.optimizer import State
from steadyrl.core.cuda_graph import host_sees


def all_reduce_gradient(
    gradient: Tensor, means: Tensor, comm: Comm, stop: Stop
) -> tuple[Tensor, Tensor]:
    """Collective: return gradient [P] and metrics [K] summed over all ranks.

    On the host, every rank's stop request is reduced with them, so that all ranks stop after the
    same step.
    """
    packed = torch.cat((gradient, means, means.new_full((1,), float(stop.local))))
    comm.all_reduce_(packed)
    sizes = len(gradient), len(means), 1
    gradient, means, stop_requested = (part.clone() for part in packed.split(sizes))
    if host_sees(stop_requested) and stop_requested.item():
        stop.commit()
    return gradient, means


class AllReduceStep:
    """Two functions, which may be graphs, with the all-reduce between them.

    The collective stays outside of graphs: a rank that is interrupted or fails inside one would
    leave the others waiting in the same replay.
    """

    def __init__(
        self,
        gradient: Callable[..., Any],
        update: Callable[..., Any],
        comm: Comm,
        stop: Callable[[], Stop],
    ) -> None:
        self.gradient, self.update = gradient, update
        self._comm, self._stop = comm, stop

    def __call__(
        self,
        weights: tuple[Tensor, ...],
        state: State,
        scalars: tuple[Any, ...],
        batch: Any,
        sample_weight: Tensor,
    ) -> tuple[Tensor, ...]:
        """Take the step; return the metrics [K] over all ranks and this rank's aux outputs [B]."""
        gradient, means, *aux = self.gradient(weights, scalars, batch, sample_weight)
        gradient, means = all_reduce_gradient(gradient, means, self._comm, self._stop())
        return self.update(weights[0], gradient, state, scalars[0], means), *aux
