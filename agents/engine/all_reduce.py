"""A gradient step of several ranks: local gradients, one all-reduce, the same update everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steadyrl.agents.engine.inductor import CompiledGraph
from steadyrl.agents.learner.adam import AdamState
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.core.cuda_graph import host_sees


class AllReduceStep:
    """Replace the whole-step graph by two graphs with the all-reduce between them.

    The collective stays outside of graphs: a rank that is interrupted or fails inside one would
    leave the others waiting in the same replay. Metrics are reduced with the gradient and, on the
    host, so is every rank's stop request, so that all ranks stop after the same step.
    """

    def __init__(
        self,
        gradient_function: Callable[..., Any],
        apply_gradients: Callable[..., Any],
        comm: Comm,
        stop: Callable[[], Stop],
    ) -> None:
        self._gradient_function, self._apply_gradients, self._comm, self._stop = (
            gradient_function,
            apply_gradients,
            comm,
            stop,
        )

    def __call__(
        self,
        weights: tuple[Tensor, ...],
        adam: AdamState,
        scalars: tuple[Any, ...],
        batch: Any,
        sample_weight: Tensor,
    ) -> tuple[Tensor, ...]:
        """Take the step; return the metrics [K] over all ranks and this rank's aux outputs [B]."""
        gradient, values, *aux = self._gradient_function(weights, scalars, batch, sample_weight)
        stop = self._stop()
        packed = torch.cat((gradient, values, values.new_full((1,), float(stop.local))))
        self._comm.all_reduce_(packed)
        sizes = len(gradient), len(values), 1
        gradient, values, stop_requested = (part.clone() for part in packed.split(sizes))
        if host_sees(stop_requested) and stop_requested.item():
            stop.commit()
        return self._apply_gradients(weights[0], gradient, adam, scalars[0], values), *aux

    def build(self, args: tuple[Any, ...]) -> None:
        """Compile both halves for inputs of these shapes; the inputs are not changed."""
        weights, adam, scalars, batch, sample_weight = args
        with self._comm.long_operation():
            if isinstance(self._gradient_function, CompiledGraph):
                self._gradient_function.build((weights, scalars, batch, sample_weight))
            if isinstance(self._apply_gradients, CompiledGraph):
                # Only shapes matter: the gradient of copies of the weights will do.
                copies = tuple(network.clone() for network in weights)
                gradient, values, *_ = self._gradient_function(
                    copies, scalars, batch, sample_weight
                )
                self._apply_gradients.build((weights[0], gradient, adam, scalars[0], values))
