"""One gradient step of PPO: eagerly, or as one compiled graph of the same function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from agents.adam import AdamState, adam_, adam_state, clip_
from agents.compiling import Mode, compiled
from agents.heads import Head
from agents.networks import FlatNetwork
from agents.ppo_loss import (
    PPOLoss,
    approximate_kl,
    clipped_value_loss,
    normalised,
    policy_loss,
    value_loss,
)
from agents.ppo_settings import PPOSettings
from buffers.batch import RolloutBatch

METRICS = (*(f"train/{name}" for name in PPOLoss._fields), "train/grad_norm")
APPROX_KL = METRICS.index("train/approx_kl")
ADAM_EPSILON = 1e-5
KL_TOLERANCE = 1.5  # an epoch stops where the KL exceeds the target by this factor


class Rates(NamedTuple):
    """The annealed numbers; tensors where a compiled graph must see them change."""

    learning_rate: Tensor  # []
    clip: float | Tensor  # []


class PPOUpdate:
    """Hold the optimiser; a call takes one step on a minibatch and returns its metrics [K]."""

    def __init__(
        self, settings: PPOSettings, network: FlatNetwork, head: Head, mode: Mode, rows: int
    ) -> None:
        device = network.weights.device
        self._settings = settings
        self._network = network
        self._head = head
        self._adam = adam_state(network.weights)
        self._learning_rate = torch.zeros((), device=device)
        self._clip: float | Tensor = 0.0
        self._step: Callable[..., Tensor] = self._eager
        self._pad: Padding | None = None
        if mode != "eager":
            self._step = compiled(self._graph, mode, self._eager)
            self._pad = Padding(rows)
            self._clip = torch.zeros((), device=device)

    def set_rates(self, learning_rate: float, clip: float) -> None:
        """Set the step size and ε of the steps to come."""
        self._learning_rate.fill_(learning_rate)
        if isinstance(self._clip, Tensor):
            self._clip.fill_(clip)
        else:
            self._clip = clip

    def __call__(self, batch: RolloutBatch) -> Tensor:
        """Take one step on `batch`, unless its KL is beyond the target."""
        rows = len(batch.advantage)
        if self._pad is None:
            weight = torch.full_like(batch.advantage, 1 / rows)
        else:
            batch, weight = self._pad(batch)
        rates = Rates(self._learning_rate, self._clip)
        return self._step(self._network.weights, self._adam, rates, batch, weight)

    def exceeded(self, metrics: Tensor) -> bool:
        """Say whether the epochs end here; looks at the device only if there is a target."""
        target = self._settings.target_kl
        return target is not None and bool(metrics[APPROX_KL] > KL_TOLERANCE * target)

    def _loss(
        self, network: Any, batch: RolloutBatch, weight: Tensor, clip: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss [] and all PPOLoss fields [6], detached."""
        s = self._settings
        parameters, value = network(batch.obs)
        log_prob, entropy = self._head.evaluate(parameters, batch.action)
        log_ratio = log_prob - batch.log_prob
        ratio = log_ratio.exp()
        if s.clip_value:
            squares = clipped_value_loss(value, batch.value, batch.return_, clip)
        else:
            squares = value_loss(value, batch.return_)
        policy = policy_loss(ratio, batch.advantage, clip)
        each = torch.add(policy, squares, alpha=s.value_coef)
        if s.entropy_coef:
            each = torch.sub(each, entropy, alpha=s.entropy_coef)
        loss = torch.dot(each, weight)
        with torch.no_grad():
            kl = approximate_kl(log_ratio, ratio)
            clipped = ((ratio - 1).abs() > clip).float()
            parts = PPOLoss(each, policy, squares, entropy, kl, clipped)
            return loss, torch.mv(torch.stack(parts), weight)

    def _eager(
        self,
        weights: Tensor,
        adam: AdamState,
        rates: Rates,
        batch: RolloutBatch,
        weight: Tensor,
    ) -> Tensor:
        # The module's parameters are views of `weights`, their gradients views of `gradient`:
        # autograd accumulates straight into it.
        gradient = self._network.gradient.zero_()
        metrics = []
        for piece, share in self._pieces(batch, weight):
            loss, parts = self._loss(self._network.module, piece, share, rates.clip)
            loss.backward()
            metrics.append(parts)
        return self._finish(weights, gradient, adam, rates, metrics)

    def _graph(
        self,
        weights: Tensor,
        adam: AdamState,
        rates: Rates,
        batch: RolloutBatch,
        weight: Tensor,
    ) -> Tensor:
        def loss(weights: Tensor, piece: RolloutBatch, share: Tensor) -> tuple[Tensor, Tensor]:
            return self._loss(self._network.function(weights), piece, share, rates.clip)

        gradient = torch.zeros_like(weights)
        metrics = []
        for piece, share in self._pieces(batch, weight):
            slope, (_, parts) = grad_and_value(loss, has_aux=True)(weights, piece, share)
            gradient = gradient + slope
            metrics.append(parts)
        return self._finish(weights, gradient, adam, rates, metrics)

    def _pieces(self, batch: RolloutBatch, weight: Tensor) -> Iterator[tuple[RolloutBatch, Tensor]]:
        """Normalise the advantages over the whole minibatch, then cut it for accumulation."""
        batch = batch._replace(advantage=normalised(batch.advantage, weight))
        count = self._settings.grad_accumulation
        if count == 1:
            yield batch, weight
            return
        chunks = zip(*(tensor.chunk(count) for tensor in (*batch, weight)), strict=True)
        for *fields, share in chunks:
            yield RolloutBatch(*fields), share

    @torch.no_grad()
    def _finish(
        self,
        weights: Tensor,
        gradient: Tensor,
        adam: AdamState,
        rates: Rates,
        metrics: list[Tensor],
    ) -> Tensor:
        parts = metrics[0] if len(metrics) == 1 else torch.stack(metrics).sum(0)
        norm = clip_(gradient, self._settings.max_grad_norm)
        if self._settings.target_kl is None:
            adam_(weights, gradient, adam, rates.learning_rate, epsilon=ADAM_EPSILON)
        else:
            # Undo the step where the KL is beyond the target, without asking the device.
            keep = parts[APPROX_KL] <= KL_TOLERANCE * self._settings.target_kl
            before = [tensor.clone() for tensor in (weights, *adam)]
            adam_(weights, gradient, adam, rates.learning_rate, epsilon=ADAM_EPSILON)
            for now, then in zip((weights, *adam), before, strict=True):
                now.copy_(torch.where(keep, now, then))
        return torch.cat((parts, norm.unsqueeze(0)))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's moments and step count."""
        return {name: tensor.clone() for name, tensor in self._adam._asdict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for name, tensor in self._adam._asdict().items():
            tensor.copy_(state[name])


class Padding:
    """Bring minibatches to one size, because a compiled graph has one.

    What is missing is filled with the first row again, at weight 0: no number that the
    minibatch has not itself.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._batch: RolloutBatch | None = None
        self._weight = torch.empty(0)

    def __call__(self, batch: RolloutBatch) -> tuple[RolloutBatch, Tensor]:
        """Return [rows, …] tensors, the same at every call, and their weights [rows]."""
        if self._batch is None:
            self._batch = RolloutBatch(*(t.new_empty((self._rows, *t.shape[1:])) for t in batch))
            self._weight = batch.advantage.new_empty(self._rows)
        rows = len(batch.advantage)
        for padded, tensor in zip(self._batch, batch, strict=True):
            padded[:rows] = tensor
            if rows < self._rows:
                padded[rows:] = tensor[0]
        self._weight[:rows] = 1 / rows
        self._weight[rows:] = 0
        return self._batch, self._weight
