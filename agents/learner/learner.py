"""The one learner: a gradient step on any algorithm's loss, eagerly or as one graph.

What algorithms differ in is their recipe. All else is here: accumulation, clipping, Adam, undoing
a step that went too far, compilation.
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

from steadyrl.agents.engine.engine import Mode, compile_for_mode
from steadyrl.agents.engine.inductor import CompiledGraph
from steadyrl.agents.learner.adam import (
    MOST_COUNTED,
    AdamState,
    adam_,
    adam_state,
    adam_traceable_,
    clip_grad_norm_,
)
from steadyrl.agents.learner.all_reduce import AllReduceStep
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
from steadyrl.core.saved import COUNT, Limits
from steadyrl.core.state import Stateful

LARGEST_SQUARE, SMALLEST_SQUARE = 1e30, 1e-30  # of gradients; smaller ones vanish in float32


@torch.no_grad()
def weighted_means(rows: PerSampleLoss, sample_weight: Tensor) -> Tensors:
    """Return the means [K] of losses and metrics by the rows' shares [B], and the reports."""
    return torch.mv(torch.stack((rows.loss, *rows.metrics)), sample_weight), *rows.aux


class MetricMeans(Stateful):
    """The metrics of steps, added up until somebody asks for their means."""

    state_names = ("sums", "summed")
    state_limits: ClassVar[Mapping[str, Limits]] = {"summed": COUNT}

    def __init__(self, names: tuple[str, ...], device: torch.device, *, fresh: bool) -> None:
        self.names, self.summed = names, 0
        self.sums = torch.zeros(len(names), device=device)
        # `fresh`: each step's numbers are a tensor of their own.
        self._host_view: Any = self.sums.numpy() if fresh and host_sees(self.sums) else None

    def add(self, values: Tensor) -> bool:
        """Add the metrics [K] of a step; say whether all losses were finite, if a look is free."""
        self.summed += 1
        if (
            self._host_view is None
        ):  # a device's, where a recorded graph writes the next ones as well
            (self.sums.copy_ if self.summed == 1 else self.sums.add_)(values)
            return True
        # Between graphs' turns caches are cold: what is small is cheapest by NumPy, or not done.
        if self.summed == 1:
            self.sums, self._host_view = values, values.numpy()
        else:
            self._host_view += values.numpy()
        return math.isfinite(self._host_view[0])

    def __call__(self, others: Mapping[str, Tensor] | None = None) -> Metrics | None:
        """Return the means since the last call, and `others` []; None where there are neither."""
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
    """What a step is told besides weights: in the same tensors always, where a graph reads them."""

    def __init__(self, device: torch.device, max_batch_size: int | None, *, fixed: bool) -> None:
        self.padding = Padding(max_batch_size) if fixed and max_batch_size else None
        self._fixed = fixed
        self._values: LossScalars = ()  # what the tensors hold
        self._tensors: tuple[Tensor, ...] = ()
        self._sample_weight = torch.empty(0, device=device)

    def of(
        self, batch: Any, sample_weight: float | Tensor | None, rate: float, scalars: LossScalars
    ) -> tuple[LossScalars, Any, Tensor]:
        """Return rate and numbers, the batch, and what each of its rows counts for."""
        own = (
            self._in_buffers(rate, *scalars) if self._fixed else (*self._in_buffers(rate), *scalars)
        )
        if isinstance(sample_weight, Tensor):  # who says it row by row has brought them to one size
            self._sample_weight = sample_weight
        elif self.padding is not None:
            batch, self._sample_weight = self.padding(batch, sample_weight)
        elif sample_weight is not None or len(self._sample_weight) != len(batch[0]):
            each = 1 / len(batch[0]) if sample_weight is None else sample_weight
            self._sample_weight = self._sample_weight.new_full((len(batch[0]),), each)
        return own, batch, self._sample_weight

    def _in_buffers(self, *scalars: float | Tensor) -> tuple[Tensor, ...]:
        """Return the numbers as tensors, which are written to only where they change."""
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
    """Holds a network's optimiser; every step changes its weights and gives the rows' reports."""

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
        self.updates = 0  # steps that were taken
        self.kl_exceeded = False  # the last one was beyond the limit, and was not
        self.stop = Stop()
        # What one row of a batch counts for; None: its part of these rows, which are all.
        self.sample_weight: float | Tensor | None = None  # or of each [B]
        self._loss_spec, self._mode, self._networks = loss_spec, mode, (network, *frozen)
        # Themselves, because nothing hooks into these modules and each call costs.
        self._forwards = [n.module.forward for n in self._networks]
        self.forward: Forward = self._forwards[0]  # as updates see it, which may be rounded
        self._on_host = host_sees(network.weights)
        names = ("train/loss", *loss_spec.metrics, "train/grad_norm")
        self.means = MetricMeans(names, device, fresh=mode != "cudagraph")
        self._inputs = StepInputs(device, loss_spec.max_batch_size, fixed=mode != "eager")
        self.padding = self._inputs.padding  # who makes batches may use its room
        step_function = partial(self._train_step, True), mode, partial(self._train_step, False)
        self._run = compile_for_mode(
            *step_function, only_read=(3,)
        )  # the batch: PPO's may be a whole rollout
        self.ready = mode != "compiled"  # else the next step is held up by a compiler

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        steps, most = self.adam.step.item(), min(self.updates, MOST_COUNTED)
        skips = self._loss_spec.limit is not None  # a step beyond the limit is none of Adam's
        if not (0 <= steps <= most and steps % 1 == 0 and (skips or steps == most)):
            raise ValueError(f"adam.step: is {steps:g} after {self.updates} updates")
        exp_avg, exp_avg_sq = self.adam.exp_avg, self.adam.exp_avg_sq
        if (exp_avg_sq < 0).any() or (exp_avg_sq > LARGEST_SQUARE).any():
            raise ValueError(f"adam.square: holds a number that is not 0 to {LARGEST_SQUARE:g}")
        # Of whatever gradients, by Cauchy and Schwarz: (Σ b₁^k g)² ≤ 53 · Σ b₂^k g².
        if (exp_avg.square() > 60 * exp_avg_sq + SMALLEST_SQUARE).any():
            raise ValueError("adam.mean: holds a number that no mean of such squares is")

    def set_precision(self, precision: Precision) -> None:
        """Read networks in this precision; before the first step."""
        device, count = self.network.weights.device, len(self._networks)
        loss = loss_in_precision(precision, self._loss_spec.loss, count, device)
        self._loss_spec = replace(self._loss_spec, loss=loss)
        self.forward = forward_in_precision(precision, self._forwards[0], device)

    def attach_comm(self, comm: Comm) -> None:
        """Take every step together with other ranks, from the weights that rank 0 has.

        Batches come prepared, and with their rows' shares, from who knows those of all ranks.
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
        """Take one step on `batch`; return the reports of its rows [B].

        One beyond the limit is not taken, which `kl_exceeded` says. The first one may have to compile,
        which is cut short at once if the run is to end.
        """
        arguments = self._step_inputs(batch, learning_rate, scalars)
        if not self.ready:
            self._compile_for(arguments)
        metrics, *aux = self._run(*arguments)
        self.kl_exceeded = self._exceeds_limit(metrics)
        if self.kl_exceeded:  # it was undone, and is nobody's update
            return tuple(aux)
        self.updates += 1
        # On a device a look at the loss would stall the queue, and the next flush finds it.
        if not self.means.add(metrics):
            raise NonFiniteError(f"train/loss is not finite at update {self.updates}")
        return tuple(aux)

    def compile_for(self, batch: Any, learning_rate: float, *scalars: float | Tensor) -> None:
        """Compile for arguments like these, which are only looked at."""
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
        """Take back all steps, their counts and what `others` held, if CutShortError ends them."""
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
        """Bytes of the weights, their gradient and the optimiser's moments."""
        return self.network.nbytes + self.adam.exp_avg.nbytes + self.adam.exp_avg_sq.nbytes

    @property
    def uses_autocast(self) -> bool:
        """Whether updates read the network in other numbers than who acts."""
        return self.forward is not self._forwards[0]

    def _exceeds_limit(self, metrics: Tensor) -> bool:
        """Return whether a step with these metrics [K] was; asks the device only for a limit."""
        limit = self._loss_spec.limit
        return limit is not None and metrics[self.means.names.index(limit[0])].item() > limit[1]

    def _train_step(self, in_graph: bool, *arguments: Any) -> Tensors:
        """Compute and take a step; in a graph as one function of tensors, to be compiled."""
        weights, adam, scalars, batch, sample_weight = arguments
        gradient_function = self._graph_gradient if in_graph else self._eager_gradient
        gradient, values, *aux = gradient_function(weights, scalars, batch, sample_weight)
        step = weights[0], gradient, adam, scalars[0], values
        return self._apply_gradients(*step, in_graph=in_graph), *aux

    @torch.enable_grad()  # an environment in this process may have switched it off
    def _eager_gradient(
        self, _: Tensors, scalars: tuple[Any, ...], batch: Any, sample_weight: Tensor
    ) -> Tensors:
        """Return gradient [P], metrics [K] and reports [B]."""
        # Parameters are views of these weights, and their gradients of one that it adds to.
        gradient = self.network.gradient.zero_()
        microbatches = []
        for microbatch, part in self._microbatches(batch, sample_weight):
            rows = self._loss_spec.loss(*self._forwards, microbatch, *scalars[1:])
            # What `Tensor.backward` ends in: the way there takes a twentieth of a small update.
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((rows.loss,), (part,), False, False, (), True, True)
            microbatches.append(weighted_means(rows, part))
        return gradient, *(microbatches[0] if len(microbatches) == 1 else merge(microbatches))

    def _graph_gradient(
        self, weights: Tensors, scalars: Tensors, batch: Any, sample_weight: Tensor
    ) -> Tensors:
        learned, *frozen = weights
        gradients: list[Tensor] = []
        microbatches = []
        for microbatch, part in self._microbatches(batch, sample_weight):
            own = learned.detach().requires_grad_()
            pairs = zip(self._networks, (own, *frozen), strict=True)
            networks = [network.function(values) for network, values in pairs]
            with torch.enable_grad():
                rows = self._loss_spec.loss(*networks, microbatch, *scalars[1:])
                gradients += torch.autograd.grad(torch.dot(rows.loss, part), own)
            microbatches.append(weighted_means(rows, part))
        return sum(gradients[1:], gradients[0]), *(
            microbatches[0] if len(microbatches) == 1 else merge(microbatches)
        )

    def _microbatches(self, batch: Any, sample_weight: Tensor) -> list[tuple[Any, Tensor]]:
        """Prepare the batch as a whole, then cut it; return pieces and their rows' shares."""
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
        """Step along the gradient, if within the limit; return the metrics [K] and its norm."""
        looking, limit = self._on_host and not in_graph, self._loss_spec.limit  # a look is free
        norm = clip_grad_norm_(gradient, self._loss_spec.max_grad_norm, looking=looking)
        metrics = torch.cat((values, norm.unsqueeze(0)))
        within: Any = limit is None or values[self.means.names.index(limit[0])] <= limit[1]
        if looking and not within:
            return metrics
        undoable = () if looking or limit is None else (weights, *adam)
        before = [(tensor, tensor.clone()) for tensor in undoable]
        step_ = adam_traceable_ if in_graph else adam_
        step_(weights, gradient, adam, rate, epsilon=self._loss_spec.epsilon)
        for now, then in before:  # without asking the device
            now.copy_(torch.where(within, now, then))
        return metrics
