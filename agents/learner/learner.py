"""The learner: one gradient step on any algorithm's loss, run eagerly or as a compiled graph.

What differs between algorithms is their `LossSpec`. The learner does the rest: microbatches,
gradient clipping, Adam, undoing a step that exceeds a limit, compilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.engine.all_reduce import AllReduceStep
from steadyrl.agents.engine.direct import direct_adam, direct_backward
from steadyrl.agents.engine.engine import Mode, compile_for_mode
from steadyrl.agents.engine.inductor import CompiledGraph
from steadyrl.agents.learner.adam import (
    MOST_COUNTED,
    AdamState,
    adam_state,
    adam_traceable_,
    clip_grad_norm_,
)
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.interrupt import Interrupted, Stop
from steadyrl.agents.learner.loss_spec import LossScalars, LossSpec, PerSampleLoss, Tensors
from steadyrl.agents.learner.minibatch import Padding, merge, split
from steadyrl.agents.learner.precision import (
    Forward,
    Precision,
    forward_in_precision,
    loss_in_precision,
)
from steadyrl.core.cuda_graph import host_sees
from steadyrl.core.errors import NonFiniteError
from steadyrl.core.metrics import Metrics
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful

LARGEST_SQUARE, SMALLEST_SQUARE = 1e30, 1e-30  # of gradients; smaller ones vanish in float32


@torch.no_grad()
def weighted_means(losses: PerSampleLoss, sample_weight: Tensor) -> Tensors:
    """Return the weighted means [K] of loss and metrics over the batch, and the aux outputs [B]."""
    return torch.mv(torch.stack((losses.loss, *losses.metrics)), sample_weight), *losses.aux


class MetricMeans(Stateful):
    """Sums of the metrics of steps, and their means over the steps since the last call."""

    state_names = ("sums", "summed")
    state_limits: ClassVar[Mapping[str, Limits]] = {"summed": COUNT}

    def __init__(self, names: tuple[str, ...], device: torch.device, *, fresh: bool) -> None:
        self.names, self.summed = names, 0
        self.sums = torch.zeros(len(names), device=device)
        # `fresh`: every step returns its metrics in a new tensor, which may be summed into.
        self._host_view: Any = self.sums.numpy() if fresh and host_sees(self.sums) else None

    def add(self, values: Tensor) -> bool:
        """Add the metrics [K] of a step; return False if the loss is known not to be finite.

        Only the host is checked: reading a number of a device would synchronise it.
        """
        self.summed += 1
        if self._host_view is None:  # on a device, where a CUDA graph overwrites `values`
            (self.sums.copy_ if self.summed == 1 else self.sums.add_)(values)
            return True
        # Between two runs of a graph caches are cold: NumPy adds a few numbers faster than torch.
        if self.summed == 1:
            self.sums, self._host_view = values, values.numpy()
        else:
            self._host_view += values.numpy()
        return math.isfinite(self._host_view[0])

    def __call__(self, others: Mapping[str, Tensor] | None = None) -> Metrics | None:
        """Return the means since the last call and `others` []; None if there are neither."""
        if not self.summed:
            return Metrics(tuple(others), torch.stack(list(others.values()))) if others else None
        names, many = self.names, self.summed
        values = self.sums / many if many > 1 or self._host_view is None else self.sums
        if others:
            names = (*names, *others)
            values = torch.cat((values, torch.stack(list(others.values()))))
        self.summed = 0
        return Metrics(names, values)


class StepInputs:
    """Non-parameter inputs of a step, in static buffers when the step is a graph."""

    def __init__(self, device: torch.device, max_batch_size: int | None, *, fixed: bool) -> None:
        self.padding = Padding(max_batch_size) if fixed and max_batch_size else None
        self._fixed = fixed
        self._values: LossScalars = ()  # the numbers that the buffers hold
        self._tensors: tuple[Tensor, ...] = ()
        self._sample_weight = torch.empty(0, device=device)

    def of(
        self, batch: Any, sample_weight: float | Tensor | None, rate: float, scalars: LossScalars
    ) -> tuple[LossScalars, Any, Tensor]:
        """Return learning rate and loss scalars, the batch, and the sample weights [B]."""
        own = (
            self._in_buffers(rate, *scalars) if self._fixed else (*self._in_buffers(rate), *scalars)
        )
        if isinstance(sample_weight, Tensor):  # per sample: already of fixed size
            self._sample_weight = sample_weight
        elif self.padding is not None:
            batch, self._sample_weight = self.padding(batch, sample_weight)
        elif sample_weight is not None or len(self._sample_weight) != len(batch[0]):
            each = 1 / len(batch[0]) if sample_weight is None else sample_weight
            self._sample_weight = self._sample_weight.new_full((len(batch[0]),), each)
        return own, batch, self._sample_weight

    def _in_buffers(self, *scalars: float | Tensor) -> tuple[Tensor, ...]:
        """Return the numbers as tensors [], written only when they change."""
        if not self._tensors:
            self._values = (math.nan,) * len(scalars)  # equal to no number
            self._tensors = tuple(
                self._sample_weight.new_empty(torch.as_tensor(n).shape) for n in scalars
            )
        for tensor, number, before in zip(self._tensors, scalars, self._values, strict=True):
            if isinstance(number, Tensor):
                tensor.copy_(number)
            elif number != before:
                tensor.fill_(number)
        self._values = scalars
        return self._tensors


class Learner(Stateful):
    """Own a network's optimiser; a step updates the weights and returns the loss's aux outputs."""

    state_names = ("network", "adam", "updates", "means")
    state_limits: ClassVar[Mapping[str, Limits]] = {"updates": COUNT}

    def __init__(
        self,
        loss_spec: LossSpec,
        network: FlatNetwork,
        mode: Mode,
        *,
        frozen: Sequence[FlatNetwork] = (),
    ) -> None:
        device = network.weights.device
        self.network = network
        self.adam = adam_state(network.weights)
        self.updates = 0  # steps taken
        self.kl_exceeded = False  # whether the last step exceeded the limit and was undone
        self.stop = Stop()
        # Weight of one sample, or of each [B], in the mean over a batch; None: 1/B.
        self.sample_weight: float | Tensor | None = None
        self._loss_spec, self._mode, self._networks = loss_spec, mode, (network, *frozen)
        # `forward` itself: nothing registers hooks on these modules, and `__call__` costs time.
        self._forwards = [n.module.forward for n in self._networks]
        self.forward: Forward = self._forwards[0]  # as updates compute it (bf16 with autocast)
        self._on_host = host_sees(network.weights)
        self._backward, self._adam = direct_backward(), direct_adam()
        names = ("train/loss", *loss_spec.metrics, "train/grad_norm")
        self.means = MetricMeans(names, device, fresh=mode != "cudagraph")
        self._inputs = StepInputs(device, loss_spec.max_batch_size, fixed=mode != "eager")
        self.padding = self._inputs.padding  # batches may be built in its buffers
        step_function = partial(self._train_step, True), mode, partial(self._train_step, False)
        # The batch is only read: with `index_batches` it is a whole rollout, too large to copy.
        self._run = compile_for_mode(*step_function, only_read=(3,))
        self.ready = mode != "compiled"  # else the next step compiles first

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        steps, most = self.adam.step.item(), min(self.updates, MOST_COUNTED)
        skips = self._loss_spec.limit is not None  # a step that exceeds the limit does not count
        if not (0 <= steps <= most and steps % 1 == 0 and (skips or steps == most)):
            raise ValueError(f"adam.step: is {steps:g} after {self.updates} updates")
        exp_avg, exp_avg_sq = self.adam.exp_avg, self.adam.exp_avg_sq
        if (exp_avg_sq < 0).any() or (exp_avg_sq > LARGEST_SQUARE).any():
            raise ValueError(f"adam.exp_avg_sq: holds a number outside 0 to {LARGEST_SQUARE:g}")
        # For any gradients, by Cauchy–Schwarz: (Σ b₁^k g)² ≤ 53 · Σ b₂^k g².
        if (exp_avg.square() > 60 * exp_avg_sq + SMALLEST_SQUARE).any():
            raise ValueError("adam.exp_avg: is larger than adam.exp_avg_sq allows")

    def set_precision(self, precision: Precision) -> None:
        """Compute forward passes of updates in this precision; call it before the first step."""
        device, count = self.network.weights.device, len(self._networks)
        loss = loss_in_precision(precision, self._loss_spec.loss, count, device)
        self._loss_spec = replace(self._loss_spec, loss=loss)
        self.forward = forward_in_precision(precision, self._forwards[0], device)

    def attach_comm(self, comm: Comm) -> None:
        """Collective: all-reduce the gradient of every step; start from rank 0's weights.

        Batches must be preprocessed already, with sample weights that sum to 1 over all ranks.
        """
        self._loss_spec = replace(self._loss_spec, preprocess_batch=None)
        for network in self._networks:
            network.attach_comm(comm)
        gradient_function = compile_for_mode(
            self._graph_gradient, self._mode, self._eager_gradient, only_read=(2,)
        )
        apply_gradients = compile_for_mode(
            partial(self._apply_gradients, in_graph=True), self._mode, self._apply_gradients
        )
        self._run = AllReduceStep(gradient_function, apply_gradients, comm, lambda: self.stop)
        self.ready = self._mode != "compiled"

    def step(self, batch: Any, learning_rate: float, *scalars: float | Tensor) -> Tensors:
        """Take one step on `batch`; return the aux outputs of its samples [B].

        A step whose metric exceeds the limit is undone, and `kl_exceeded` is set. The first step
        may compile, which a stop request interrupts immediately.
        """
        arguments = self._step_inputs(batch, learning_rate, scalars)
        if not self.ready:
            self._compile_for(arguments)
        metrics, *aux = self._run(*arguments)
        self.kl_exceeded = self._exceeds_limit(metrics)
        if self.kl_exceeded:  # undone: it does not count
            return tuple(aux)
        self.updates += 1
        # On a device, reading the loss would synchronise: the next log flush checks it instead.
        if not self.means.add(metrics):
            raise NonFiniteError(f"train/loss is not finite at update {self.updates}")
        return tuple(aux)

    def compile_for(self, batch: Any, learning_rate: float, *scalars: float | Tensor) -> None:
        """Compile for inputs of these shapes; the inputs are not changed."""
        self._compile_for(self._step_inputs(batch, learning_rate, scalars))

    def _compile_for(self, arguments: tuple[Any, ...]) -> None:
        if isinstance(self._run, CompiledGraph | AllReduceStep):
            with self.stop.interruptible():
                self._run.build(arguments)
        self.ready = True

    def _step_inputs(self, batch: Any, rate: float, scalars: LossScalars) -> tuple[Any, ...]:
        weights = tuple(network.weights for network in self._networks)
        return weights, self.adam, *self._inputs.of(batch, self.sample_weight, rate, scalars)

    @contextmanager
    def transaction(self, *others: Tensor) -> Iterator[None]:
        """Restore weights, optimiser, counts and `others` if Interrupted is raised inside."""
        tensors = (self.network.weights, *self.network.module.buffers(), *self.adam, *others)
        before = [tensor.clone() for tensor in tensors]
        counts = (self.updates, self.means.summed, self.means.sums.clone())
        try:
            yield
        except Interrupted:
            self.updates, self.means.summed, sums = counts
            with torch.no_grad():
                for tensor, value in zip((*tensors, self.means.sums), (*before, sums), strict=True):
                    tensor.copy_(value)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, the gradient and Adam's moments."""
        return self.network.nbytes + self.adam.exp_avg.nbytes + self.adam.exp_avg_sq.nbytes

    @property
    def uses_autocast(self) -> bool:
        """Whether updates compute the network in another precision than the actors."""
        return self.forward is not self._forwards[0]

    def _exceeds_limit(self, metrics: Tensor) -> bool:
        """Return whether the metrics [K] exceed the limit; synchronises only if there is one."""
        limit = self._loss_spec.limit
        return limit is not None and metrics[self.means.names.index(limit[0])].item() > limit[1]

    def _train_step(self, in_graph: bool, *arguments: Any) -> Tensors:
        """Compute the gradient and apply it; in a graph, as one pure function of tensors."""
        weights, adam, scalars, batch, sample_weight = arguments
        gradient_function = self._graph_gradient if in_graph else self._eager_gradient
        gradient, values, *aux = gradient_function(weights, scalars, batch, sample_weight)
        step = weights[0], gradient, adam, scalars[0], values
        return self._apply_gradients(*step, in_graph=in_graph), *aux

    @torch.enable_grad()  # an environment in this process may have disabled it
    def _eager_gradient(
        self, _: Tensors, scalars: tuple[Any, ...], batch: Any, sample_weight: Tensor
    ) -> Tensors:
        """Return gradient [P], metrics [K] and aux outputs [B]."""
        # `parameter.grad` are views of this tensor: backward passes accumulate into it.
        gradient = self.network.gradient.zero_()
        results = []
        for microbatch, weight in self._microbatches(batch, sample_weight):
            losses = self._loss_spec.loss(*self._forwards, microbatch, *scalars[1:])
            self._backward(losses.loss, weight)
            results.append(weighted_means(losses, weight))
        return gradient, *(results[0] if len(results) == 1 else merge(results))

    def _graph_gradient(
        self, weights: Tensors, scalars: Tensors, batch: Any, sample_weight: Tensor
    ) -> Tensors:
        online, *frozen = weights
        gradients: list[Tensor] = []
        results = []
        for microbatch, weight in self._microbatches(batch, sample_weight):
            leaf = online.detach().requires_grad_()
            pairs = zip(self._networks, (leaf, *frozen), strict=True)
            networks = [network.function(values) for network, values in pairs]
            with torch.enable_grad():
                losses = self._loss_spec.loss(*networks, microbatch, *scalars[1:])
                gradients += torch.autograd.grad(torch.dot(losses.loss, weight), leaf)
            results.append(weighted_means(losses, weight))
        total = sum(gradients[1:], gradients[0])
        return total, *(results[0] if len(results) == 1 else merge(results))

    def _microbatches(self, batch: Any, sample_weight: Tensor) -> list[tuple[Any, Tensor]]:
        """Preprocess the whole batch, then split it into microbatches with their sample weights."""
        if self._loss_spec.preprocess_batch is not None:
            batch = self._loss_spec.preprocess_batch(batch, sample_weight)
        count = self._loss_spec.grad_accumulation
        return [(batch, sample_weight)] if count == 1 else split(batch, sample_weight, count)

    @torch.no_grad()
    def _apply_gradients(
        self,
        weights: Tensor,
        gradient: Tensor,
        adam: AdamState,
        rate: Tensor,
        values: Tensor,
        *,
        in_graph: bool = False,
    ) -> Tensor:
        """Clip the gradient and step, unless the limit is exceeded; return metrics and its norm."""
        read_on_host, limit = self._on_host and not in_graph, self._loss_spec.limit
        norm = clip_grad_norm_(gradient, self._loss_spec.max_grad_norm, read_on_host=read_on_host)
        metrics = torch.cat((values, norm.unsqueeze(0)))
        within: Any = limit is None or values[self.means.names.index(limit[0])] <= limit[1]
        if read_on_host and not within:
            return metrics
        undoable = () if read_on_host or limit is None else (weights, *adam)
        before = [(tensor, tensor.clone()) for tensor in undoable]
        step_ = adam_traceable_ if in_graph else self._adam
        step_(weights, gradient, adam, rate, epsilon=self._loss_spec.epsilon)
        for now, then in before:  # undo without synchronising
            now.copy_(torch.where(within, now, then))
        return metrics
