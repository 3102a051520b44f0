"""The learner: counts and metrics of gradient steps; the step itself is the engine's.

What differs between algorithms is their `LossSpec`. How a step is computed is in `engine/eager.py`,
which the other engines match.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.engine.engine import Engine, Mode, StepParts, StepResult
from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.interrupt import Interrupted, Stop
from steadyrl.agents.learner.loss_spec import LossSpec, Tensors
from steadyrl.agents.learner.optimizers.optimizer import build_optimizer, check_state, nbytes
from steadyrl.agents.learner.out_of_memory import clean_up, does_not_fit
from steadyrl.agents.learner.precision import (
    Forward,
    Precision,
    forward_in_precision,
    loss_in_precision,
)
from steadyrl.core.errors import NonFiniteError
from steadyrl.core.metrics import MetricMeans
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful


class Learner(Stateful):
    """Own a network's optimiser; a step updates the weights and returns the loss's aux outputs."""

    state_names = ("network", "optimizer_state", "updates", "means")
    state_limits: ClassVar[Mapping[str, Limits]] = {"updates": COUNT}

    def __init__(
        self,
        loss_spec: LossSpec,
        network: FlatNetwork,
        engine: Mode | Engine,
        *,
        frozen: Sequence[FlatNetwork] = (),
    ) -> None:
        self.network = network
        self._optimizer = build_optimizer(loss_spec.optimizer, network)
        self.optimizer_state = self._optimizer.state
        self.updates = 0  # steps taken
        self.watched = 0.0  # the spec's watched metric at the last step, over all ranks
        self.limit_exceeded = False  # whether the last step exceeded the limit and was undone
        self.stop = Stop()
        # Weight of one sample, or of each [B], in the mean over a batch; None: 1/B.
        self.sample_weight: float | Tensor | None = None
        self.forward: Forward = network.module.forward  # as updates compute it
        self.uses_autocast = False  # whether that is in another precision than the actors'
        names = ("train/loss", *loss_spec.metrics, "train/grad_norm", "train/loss_max")
        self.means = MetricMeans(names, network.weights.device)
        self._engine, self._networks = engine_of(engine), (network, *frozen)
        self._comm: Comm = SINGLE_PROCESS
        self._build_step(loss_spec)

    def _build_step(self, loss_spec: LossSpec) -> None:
        """Build the step; every process does so before its first."""
        self._loss_spec, watched = loss_spec, loss_spec.watched
        self._watched_index = None if watched is None else self.means.names.index(watched)
        self.train_step = self._engine.train_step(
            StepParts(loss_spec, self._networks, self._optimizer, self._comm, lambda: self.stop)
        )
        self.ready = self.train_step.ready  # else the next step compiles first
        self.padding = self.train_step.padding  # batches may be built in its buffers

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        # A step that exceeds the limit does not count.
        skips = self._loss_spec.limit is not None
        check_state(self.optimizer_state, self.updates, skips=skips)

    def set_precision(self, precision: Precision) -> None:
        """Compute forward passes of updates in this precision; call it before the first step."""
        device, count = self.network.weights.device, len(self._networks)
        self.forward = forward_in_precision(precision, self.network.module.forward, device)
        self.uses_autocast = precision == "bf16"
        loss = loss_in_precision(precision, self._loss_spec.loss, count, device)
        self._build_step(replace(self._loss_spec, loss=loss))

    def attach_comm(self, comm: Comm) -> None:
        """Collective: all-reduce the gradient of every step; start from rank 0's weights.

        Batches must be preprocessed already, with sample weights that sum to 1 over all ranks.
        """
        self._comm = comm
        for network in self._networks:
            network.attach_comm(comm)
        self._build_step(replace(self._loss_spec, preprocess_batch=None))

    def compile_for(self, batch: Any, learning_rate: float, *scalars: float | Tensor) -> None:
        """Compile for inputs of these shapes, which a stop request interrupts immediately."""
        with self.stop.interruptible():
            self.train_step.prepare(batch, self.sample_weight, learning_rate, *scalars)
        self.ready = True

    def step(self, batch: Any, learning_rate: float, *scalars: float | Tensor) -> Tensors:
        """Take one step on `batch`; return the aux outputs of its samples [B].

        A step whose watched metric exceeds the limit is undone, and `limit_exceeded` is set.
        """
        if not self.ready:
            self.compile_for(batch, learning_rate, *scalars)
        metrics, aux = self._take_step(batch, learning_rate, *scalars)
        if self._watched_index is not None:  # it synchronises with a device
            self.watched = metrics[self._watched_index].item()
        limit = self._loss_spec.limit
        self.limit_exceeded = limit is not None and self.watched > limit
        if self.limit_exceeded:  # undone: it does not count
            return aux
        self.updates += 1
        # On a device, reading the loss would synchronise: the next log flush checks it instead.
        if not self.means.add(metrics):
            raise NonFiniteError(f"train/loss is not finite at update {self.updates}")
        return aux

    def _take_step(self, batch: Any, learning_rate: float, *scalars: float | Tensor) -> StepResult:
        """Take the step; if a device has no memory left for its gradient, clean and repeat it once.

        Nothing is changed before the gradient is complete, so the repeated step is the same.
        """
        step, device = self.train_step, self.network.weights.device
        inputs = batch, self.sample_weight, learning_rate, *scalars
        try:
            return step(*inputs)
        except torch.OutOfMemoryError as error:
            if not step.repeatable:
                raise
            clean_up(device, error)
        try:  # outside of the handler, whose error keeps what the first attempt allocated
            return step(*inputs)
        except torch.OutOfMemoryError as error:
            if not step.repeatable:
                raise
            reason = error.with_traceback(None)
        parts = self._loss_spec.grad_accumulation
        found = does_not_fit(device, batch, parts, lambda part: step.try_gradient(part, *scalars))
        raise found from reason

    @contextmanager
    def transaction(self, *others: Tensor) -> Iterator[None]:
        """Restore weights, optimiser, counts and `others` if Interrupted is raised inside."""
        sums, state = self.means.sums, self.optimizer_state
        tensors = (self.network.weights, *self.network.module.buffers(), *state, *others, sums)
        before = [tensor.clone() for tensor in tensors]
        counts = self.updates, self.means.summed
        try:
            yield
        except Interrupted:
            self.updates, self.means.summed = counts
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, the gradient and the optimiser's moments."""
        return self.network.nbytes + nbytes(self.optimizer_state)
