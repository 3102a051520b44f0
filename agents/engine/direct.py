"""The reference's step without the checks around torch's operators, in one file and few calls.

Between two steps caches are cold: each Python function on the way costs a small network a percent.
On a device nothing waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from steadyrl.agents.engine.all_reduce import AllReduceStep
from steadyrl.agents.engine.cpu.policy import policy_in_machine_code
from steadyrl.agents.engine.engine import Collector, Engine, StepParts, StepResult, TrainStep
from steadyrl.agents.learner.loss_spec import LossScalars, Tensors
from steadyrl.agents.learner.minibatch import Padding, merge, microbatches, sample_weights
from steadyrl.agents.learner.optimizers.adam import BETA1, BETA2, AdamState, clip_grad_norm_
from steadyrl.agents.learner.optimizers.optimizer import State, Step
from steadyrl.core.cuda_graph import host_sees
from steadyrl.core.gates.torch_private import fused_adam, run_backward


class DirectEngine(Engine):
    """Run steps eagerly, by the operators behind torch's public functions."""

    @override
    def train_step(self, parts: StepParts) -> TrainStep:
        return DirectStep(parts)

    @override
    def policy(self, network: nn.Module) -> Any:
        return policy_in_machine_code(network)

    @override
    def collector(self, build: Callable[[], Collector | None]) -> Collector | None:
        return build()


class DirectStep(TrainStep):
    """The step as a function; on the host, the reference's to the last bit.

    Engines that make graphs extend it. The function's arguments are the weights of all networks,
    the optimiser's state, the scalars (the learning rate first), the batch and its sample weights.
    """

    fixed_inputs = False  # whether inputs are in the same buffers at every step
    is_one_call = False  # whether gradient and update are one call: which of them failed is unknown

    def __init__(self, parts: StepParts) -> None:
        self.spec, self.networks, self.optimizer, self.comm, self.stop = parts
        self._weights = tuple(network.weights for network in self.networks)
        # `forward` itself: nothing registers hooks on these modules, and `__call__` costs time.
        self._forwards = [network.module.forward for network in self.networks]
        self._on_host = host_sees(self._weights[0])
        self._run_backward = run_backward()
        self._step = self.build_step()
        size = self.spec.max_batch_size
        self.padding = Padding(size) if size and self.fixed_inputs else None
        self._scalars: LossScalars = ()  # the numbers that the buffers hold
        self._buffers: Tensors = ()
        self._sample_weight = self._weights[0].new_empty(0)
        self.run = self.build_run()

    def build_run(self) -> Callable[..., Tensors]:
        """Return the step as a function."""
        if self.comm.is_single:
            return self.whole
        return AllReduceStep(self.gradient, self.update, self.comm, self.stop)

    @override
    def __call__(
        self, batch: Any, weight: float | Tensor | None, rate: float, *scalars: float | Tensor
    ) -> StepResult:
        # Several ranks do not repeat a step: the others would wait in another all-reduce.
        self.repeatable = self.comm.is_single and not self.is_one_call
        metrics, *aux = self.run(*self.arguments(batch, weight, rate, *scalars))
        return StepResult(metrics, tuple(aux))

    @override
    def try_gradient(self, batch: Any, *scalars: float | Tensor) -> None:
        rate = self._weights[0].new_zeros(())
        self.gradient(self._weights, (rate, *scalars), batch, sample_weights(batch, None))

    def arguments(
        self, batch: Any, weight: float | Tensor | None, rate: float, *scalars: float | Tensor
    ) -> tuple[Any, ...]:
        """Return the arguments of the function, in buffers where it is a graph."""
        own: tuple[Any, ...] = (
            self._in_buffers(rate, *scalars)
            if self.fixed_inputs
            else (*self._in_buffers(rate), *scalars)
        )
        if isinstance(weight, Tensor):  # per sample: already of fixed size
            self._sample_weight = weight
        elif self.padding is not None:
            batch, self._sample_weight = self.padding(batch, weight)
        elif weight is not None or len(self._sample_weight) != len(batch[0]):
            each = 1 / len(batch[0]) if weight is None else weight
            self._sample_weight = self._sample_weight.new_full((len(batch[0]),), each)
        return self._weights, self.optimizer.state, own, batch, self._sample_weight

    def _in_buffers(self, *scalars: float | Tensor) -> Tensors:
        """Return the numbers as tensors [], written only when they change."""
        if not self._buffers:
            self._scalars = (math.nan,) * len(scalars)  # equal to no number
            self._buffers = tuple(
                self._sample_weight.new_empty(torch.as_tensor(n).shape) for n in scalars
            )
        for tensor, number, before in zip(self._buffers, scalars, self._scalars, strict=True):
            if isinstance(number, Tensor):
                tensor.copy_(number)
            elif number != before:
                tensor.fill_(number)
        self._scalars = scalars
        return self._buffers

    def whole(
        self, weights: Tensors, state: State, scalars: Any, batch: Any, weight: Tensor
    ) -> Tensors:
        """Compute the gradient and apply it."""
        gradient, means, *aux = self.gradient(weights, scalars, batch, weight)
        self.repeatable = False
        return self.update(weights[0], gradient, state, scalars[0], means), *aux

    @torch.enable_grad()  # an environment in this process may have disabled it
    def gradient(self, _: Tensors, scalars: Any, batch: Any, weight: Tensor) -> Tensors:
        """Return gradient [P], metrics [K] and aux outputs [B]."""
        spec, parts = self.spec, [(batch, weight)]
        # `parameter.grad` are views of this tensor: backward passes accumulate into it.
        gradient = self.networks[0].gradient.zero_()
        results = []
        if spec.grad_accumulation > 1:
            parts = microbatches(spec, batch, weight)
        elif spec.preprocess_batch is not None:
            parts = [(spec.preprocess_batch(batch, weight), weight)]
        for microbatch, part in parts:
            losses = spec.loss(*self._forwards, microbatch, *scalars[1:])
            if self._run_backward is None:
                losses.loss.backward(part)
            else:
                self._run_backward((losses.loss,), (part,), False, False, (), True, True)
            with torch.no_grad():
                means = torch.mv(torch.stack((losses.loss, *losses.metrics)), part)
            results.append((means, *losses.aux))
        return gradient, *(results[0] if len(results) == 1 else merge(results))

    @torch.no_grad()
    def update(
        self, weights: Tensor, gradient: Tensor, state: State, rate: Tensor, means: Tensor
    ) -> Tensor:
        """Clip the gradient and step, unless the limit is exceeded; return all metrics."""
        most, limited = self.spec.max_grad_norm, self.spec.limit is not None
        if not self._on_host:
            norm = clip_grad_norm_(gradient, most, read_on_host=False)
            within = self.spec.is_within_limit(means)
            with undone_unless(within, weights, *state):
                self._step(weights, gradient, state, rate)
            return torch.cat((means, norm.unsqueeze(0)))
        norm = torch.linalg.vector_norm(gradient)
        if most > 0 and not (size := norm.item()) <= most:
            gradient.mul_(most / (size + 1e-6))
        if not limited or self.spec.is_within_limit(means):
            self._step(weights, gradient, state, rate)
        return torch.cat((means, norm.unsqueeze(0)))

    def build_step(self) -> Step:
        """Return the optimiser's step; Adam's as its operator."""
        fused, how = fused_adam(), self.spec.optimizer
        if fused is None or how.name != "adam":
            return self.optimizer.step_
        eps, weight_decay = how.eps, how.weight_decay

        def step(weights: Tensor, gradient: Tensor, state: AdamState, rate: Tensor) -> None:
            state.step.add_(1)
            fused(
                [weights],
                [gradient],
                [state.exp_avg],
                [state.exp_avg_sq],
                [],
                [state.step],
                lr=rate,
                beta1=BETA1,
                beta2=BETA2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )

        return step


@contextmanager
def undone_unless(within: Tensor | bool, *tensors: Tensor) -> Iterator[None]:
    """Undo what a block does to tensors unless `within`, a tensor [], without synchronising."""
    before = [tensor.clone() for tensor in tensors if isinstance(within, Tensor)]
    yield
    for tensor, then in zip(tensors, before, strict=False):
        tensor.copy_(torch.where(within, tensor, then))  # type: ignore[arg-type]
