"""One gradient step of DQN: eagerly, or as one compiled graph of the same function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from agents.adam import AdamState, adam_, adam_state, clip_
from agents.compiling import Mode, compiled
from agents.dqn_loss import TDLoss, td_loss
from agents.dqn_settings import DQNSettings
from agents.flat import FlatNetwork
from buffers.batch import ReplayBatch

METRICS = ("train/loss", "train/td_error", "train/q_mean", "train/grad_norm")
ADAM_EPSILON = 1e-8


def pieces(batch: ReplayBatch, count: int) -> list[ReplayBatch]:
    """Cut a batch into `count` equal ones, as views."""
    if count == 1:
        return [batch]
    return [ReplayBatch(*p) for p in zip(*(t.chunk(count) for t in batch), strict=True)]


class DQNUpdate:
    """Hold the optimiser; a call takes one step and returns (TD errors [B], metrics [K])."""

    def __init__(
        self, settings: DQNSettings, online: FlatNetwork, target: FlatNetwork, mode: Mode
    ) -> None:
        self._settings = settings
        self._online = online
        self._target = target
        self._adam = adam_state(online.weights)
        self._learning_rate = torch.zeros((), device=online.weights.device)
        self._step = self._eager if mode == "eager" else compiled(self._graph, mode, self._eager)

    def __call__(self, batch: ReplayBatch, learning_rate: float) -> tuple[Tensor, Tensor]:
        """Take one step on `batch`."""
        self._learning_rate.fill_(learning_rate)
        return self._step(
            self._online.weights, self._target.weights, self._adam, self._learning_rate, batch
        )

    def _loss(self, online: Any, target: Any, batch: ReplayBatch) -> TDLoss:
        s = self._settings
        return td_loss(online, target, batch, double=s.double, huber=s.loss == "huber")

    def _eager(
        self,
        weights: Tensor,
        target_weights: Tensor,
        adam: AdamState,
        learning_rate: Tensor,
        batch: ReplayBatch,
    ) -> tuple[Tensor, Tensor]:
        # The modules' parameters are views of the two weight tensors, their gradients views of
        # one: autograd accumulates straight into it.
        count = self._settings.grad_accumulation
        # `forward` itself, because nothing hooks into these modules and each call costs.
        online, target = self._online.module.forward, self._target.module.forward
        gradient = self._online.gradient.zero_()
        parts = []
        for piece in pieces(batch, count):
            part = self._loss(online, target, piece)
            (part.loss if count == 1 else part.loss / count).backward()
            parts.append(part)
        return self._finish(weights, gradient, adam, learning_rate, parts)

    def _graph(
        self,
        weights: Tensor,
        target_weights: Tensor,
        adam: AdamState,
        learning_rate: Tensor,
        batch: ReplayBatch,
    ) -> tuple[Tensor, Tensor]:
        def loss(weights: Tensor, piece: ReplayBatch) -> tuple[Tensor, TDLoss]:
            target = self._target.function(target_weights)
            part = self._loss(self._online.function(weights), target, piece)
            return part.loss, part

        count = self._settings.grad_accumulation
        gradient = torch.zeros_like(weights)
        parts = []
        for piece in pieces(batch, count):
            slope, (_, part) = grad_and_value(loss, has_aux=True)(weights, piece)
            gradient = gradient + slope / count
            parts.append(part)
        return self._finish(weights, gradient, adam, learning_rate, parts)

    def _finish(
        self,
        weights: Tensor,
        gradient: Tensor,
        adam: AdamState,
        learning_rate: Tensor,
        parts: list[TDLoss],
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            norm = clip_(gradient, self._settings.max_grad_norm)
            adam_(weights, gradient, adam, learning_rate, epsilon=ADAM_EPSILON)
            if len(parts) == 1:
                loss, td_error, q_mean = parts[0]
            else:
                loss = torch.stack([p.loss for p in parts]).mean()
                td_error = torch.cat([p.td_error for p in parts])
                q_mean = torch.stack([p.q_mean for p in parts]).mean()
            return td_error, torch.stack((loss.detach(), td_error.abs().mean(), q_mean, norm))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's moments and step count."""
        return {name: tensor.clone() for name, tensor in self._adam._asdict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for name, tensor in self._adam._asdict().items():
            tensor.copy_(state[name])
