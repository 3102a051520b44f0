"""The reference: a learning step in public torch, which all other engines are held against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.engine.all_reduce import all_reduce_gradient
from steadyrl.agents.engine.engine import Engine, StepParts, StepResult, TrainStep
from steadyrl.agents.learner.loss_spec import Tensors
from steadyrl.agents.learner.minibatch import (
    merge,
    microbatches,
    sample_weights,
    weighted_means,
)
from steadyrl.agents.learner.optimizers.adam import clip_grad_norm_


class EagerEngine(Engine):
    """Run everything operation by operation."""

    @override
    def train_step(self, parts: StepParts) -> TrainStep:
        return EagerStep(parts)


REFERENCE = EagerEngine()


class EagerStep(TrainStep):
    """Gradient of the weighted mean loss, clipping, optimiser."""

    def __init__(self, parts: StepParts) -> None:
        self.spec, self.networks, self.optimizer, self.comm, self.stop = parts
        # `forward` itself: nothing registers hooks on these modules, and `__call__` costs time.
        self.forwards = [network.module.forward for network in self.networks]
        self.rate = torch.zeros((), device=self.networks[0].weights.device)

    @override
    def __call__(
        self, batch: Any, weight: float | Tensor | None, rate: float, *scalars: float | Tensor
    ) -> StepResult:
        self.repeatable = self.comm.is_single  # other ranks would wait in another all-reduce
        gradient, means, *aux = self.gradient(batch, sample_weights(batch, weight), scalars)
        self.repeatable = False
        if not self.comm.is_single:
            gradient, means = all_reduce_gradient(gradient, means, self.comm, self.stop())
        return StepResult(self.apply(gradient, means, self.rate.fill_(rate)), tuple(aux))

    @override
    def try_gradient(self, batch: Any, *scalars: float | Tensor) -> None:
        self.gradient(batch, sample_weights(batch, None), scalars)

    @torch.enable_grad()  # an environment in this process may have disabled it
    def gradient(self, batch: Any, weight: Tensor, scalars: tuple[Any, ...]) -> Tensors:
        """Return gradient [P], metrics [K] and aux outputs [B]."""
        # `parameter.grad` are views of this tensor: backward passes accumulate into it.
        gradient = self.networks[0].gradient.zero_()
        results = []
        for microbatch, part in microbatches(self.spec, batch, weight):
            losses = self.spec.loss(*self.forwards, microbatch, *scalars)
            losses.loss.backward(part)
            results.append(weighted_means(losses, part))
        return gradient, *merge(results)

    @torch.no_grad()
    def apply(self, gradient: Tensor, means: Tensor, rate: Tensor) -> Tensor:
        """Clip the gradient and step, unless the limit is exceeded; return all metrics."""
        norm = clip_grad_norm_(gradient, self.spec.max_grad_norm)
        if self.spec.is_within_limit(means):
            optimizer = self.optimizer
            optimizer.step_(self.networks[0].weights, gradient, optimizer.state, rate)
        return torch.cat((means, norm.unsqueeze(0)))
