"""The one learner: a gradient step on any algorithm's loss, eagerly or as one graph.

What algorithms differ in is a pure function from (networks, batch) to the loss of every row. All
else is here: accumulation, clipping, Adam, undoing a step that went too far, compilation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from agents.adam import AdamState, adam_, adam_state, clip_, written_out_
from agents.batches import Padding, cut, together
from agents.compiling import Compiled, Mode, compiled
from agents.networks import FlatNetwork
from agents.precision import Forward, Precision, learned_in, read_in
from agents.stopping import CutShortError, Stop
from agents.together import Together
from agents.world import World
from memory.errors import NonFiniteError
from memory.metrics import Metrics
from memory.recording import host_sees
from memory.state import Stateful

Tensors = tuple[Tensor, ...]
Numbers = tuple[float | Tensor, ...]


class RowLoss(NamedTuple):
    """What a loss says about each of B rows; the learner takes the means."""

    loss: Tensor  # [B]
    metrics: Tensors = ()  # [B] each: their means are logged
    reports: Tensors = ()  # [B] each: given back as they are, detached

    @torch.no_grad()
    def told(self, share: Tensor) -> Tensors:
        """Return the means [K] of losses and metrics by the rows' shares [B], and the reports."""
        return torch.mv(torch.stack((self.loss, *self.metrics)), share), *self.reports


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an algorithm learns from a batch, a NamedTuple of tensors [B, …]."""

    # Of the network, the frozen networks, the batch and the numbers given to `step`, in this order.
    loss: Callable[..., RowLoss]
    metrics: tuple[str, ...]  # the names of `RowLoss.metrics`
    epsilon: float  # of Adam
    max_grad_norm: float  # 0 = no clipping
    grad_accumulation: int  # pieces that a batch is cut into
    # What must be known of the whole batch before it is cut: of the batch and each row's share.
    prepare: Callable[[Any, Tensor], Any] | None = None
    # A metric and how large it may be: a step that starts beyond it is undone.
    limit: tuple[str, float] | None = None
    rows: int | None = None  # of the largest batch, where batches differ in size


class Learner(Stateful):
    """Holds a network's optimiser; every step changes its weights and gives the rows' reports."""

    state_names = ("network", "adam", "updates", "_sums", "_summed")

    def __init__(
        self,
        recipe: Recipe,
        network: FlatNetwork,
        mode: Mode,
        *,
        frozen: Sequence[FlatNetwork] = (),
    ) -> None:
        device = network.weights.device
        self.network = network
        self.adam = adam_state(network.weights)
        self.updates = 0
        self.stop = Stop()
        # What one row of a batch counts for; None: its part of these rows, which are all.
        self.share: float | Tensor | None = None  # or of each [B]
        self._recipe, self._mode = recipe, mode
        self._networks = (network, *frozen)
        # Themselves, because nothing hooks into these modules and each call costs.
        self._forwards = [n.module.forward for n in self._networks]
        self.forward: Forward = self._forwards[0]  # as updates see it, which may be …
        self.rounds = False  # … rounded, where what acts is not
        self._names = ("train/loss", *recipe.metrics, "train/grad_norm")
        self._rate = torch.zeros((), device=device)
        self._numbers: Numbers = ()
        self._share = torch.empty(0, device=device)
        self._last = torch.zeros(len(self._names), device=device)
        self._sums = torch.zeros_like(self._last)
        self._summed = 0
        self._graphs, self._seen = mode != "eager", host_sees(network.weights)
        self.padding = Padding(recipe.rows) if self._graphs and recipe.rows else None
        self._run = compiled(self._graph, mode, self._eager) if self._graphs else self._eager
        self.ready = mode != "compiled"  # else the next step is held up by a compiler

    def compute_in(self, precision: Precision) -> None:
        """Read networks in this precision; before the first step."""
        device, count = self.network.weights.device, len(self._networks)
        loss = learned_in(precision, self._recipe.loss, count, device)
        self._recipe = replace(self._recipe, loss=loss)
        self.forward = read_in(precision, self._forwards[0], device)
        self.rounds = precision == "bf16"

    def join(self, world: World) -> None:
        """Take every step together with other ranks, from the weights that rank 0 has.

        Batches come prepared, and with their rows' shares, from who knows those of all ranks.
        """
        self._recipe = replace(self._recipe, prepare=None)
        for network in self._networks:
            world.copy_((network.weights, *network.module.buffers()))
        slope: Callable[..., Any] = self._eager_slope
        finish: Callable[..., Any] = self._finish
        if self._graphs:
            slope = compiled(self._graph_slope, self._mode, slope)
            finish = compiled(partial(finish, in_graph=True), self._mode, finish)
        self._run = Together(slope, finish, world, lambda: self.stop)
        self.ready = self._mode != "compiled"

    def step(self, batch: Any, learning_rate: float, *numbers: float | Tensor) -> Tensors:
        """Take one step on `batch`; return the reports of its rows [B].

        The first one may have to compile; that is cut short at once if the run is to end.
        """
        arguments = self._arguments(batch, learning_rate, numbers)
        if not self.ready:
            self._prepare(arguments)
        self._last, *reports = self._run(*arguments)
        self.updates += 1
        # Never a name for `_last` itself: a CUDA graph writes the next step's numbers there.
        (self._sums.add_ if self._summed else self._sums.copy_)(self._last)
        self._summed += 1
        # On the host a look at the loss is free; on a device it would stall the queue, and
        # the metrics' next flush finds it.
        if self._seen and not math.isfinite(self._last.numpy()[0]):
            raise NonFiniteError(f"train/loss is not finite at update {self.updates}")
        return tuple(reports)

    def prepare(self, batch: Any, learning_rate: float, *numbers: float | Tensor) -> None:
        """Compile for arguments like these, which are only looked at."""
        self._prepare(self._arguments(batch, learning_rate, numbers))

    def _prepare(self, arguments: tuple[Any, ...]) -> None:
        if isinstance(self._run, Compiled | Together):
            with self.stop.at_once():
                self._run.build(arguments)
        self.ready = True

    def _arguments(self, batch: Any, rate: float, numbers: Numbers) -> tuple[Any, ...]:
        self._rate.fill_(rate)
        self._set(numbers)
        if self.padding is not None:
            assert not isinstance(self.share, Tensor)
            batch, self._share = self.padding(batch, self.share)
        elif isinstance(self.share, Tensor):
            self._share = self.share
        elif self.share is not None or self._share.shape != batch[0].shape[:1]:
            share = 1 / len(batch[0]) if self.share is None else self.share
            self._share = self._rate.new_full((len(batch[0]),), share)
        weights = tuple(network.weights for network in self._networks)
        return weights, self.adam, (self._rate, *self._numbers), batch, self._share

    @contextmanager
    def all_or_nothing(self, *others: Tensor) -> Iterator[None]:
        """Take back all steps, their counts and what `others` held, if CutShortError ends them."""
        own = (self.network.weights, *self.network.module.buffers(), *self.adam, self._sums)
        tensors = (*own, *others)
        before, counts = [tensor.clone() for tensor in tensors], (self.updates, self._summed)
        try:
            yield
        except CutShortError:
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)
            self.updates, self._summed = counts
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, their gradient and the optimiser's moments."""
        return self.network.nbytes + self.adam.mean.nbytes + self.adam.square.nbytes

    @property
    def exceeded(self) -> bool:
        """Whether the last step was undone; looks at the device only if there is a limit."""
        limit = self._recipe.limit
        return limit is not None and bool(self._last[self._names.index(limit[0])] > limit[1])

    def means(self, others: Mapping[str, Tensor] | None = None) -> Metrics | None:
        """Return the means since the last call, `others` [] beside them; None without a step."""
        if not self._summed:
            return None
        names, many = self._names, self._summed
        values = self._sums / many if many > 1 else self._sums.clone()
        if others:
            names = (*names, *others)
            values = torch.cat((values, torch.stack(list(others.values()))))
        self._summed = 0
        return Metrics(names, values)

    def _set(self, numbers: Numbers) -> None:
        """Take the numbers of a step; as tensors of its own where a graph must see them change."""
        if not self._graphs:
            self._numbers = numbers
            return
        if not self._numbers:
            self._numbers = tuple(self._rate.new_empty(torch.as_tensor(n).shape) for n in numbers)
        for tensor, number in zip(self._numbers, numbers, strict=True):
            assert isinstance(tensor, Tensor)
            if isinstance(number, Tensor):
                tensor.copy_(number)
            else:
                tensor.fill_(number)

    def _eager(
        self, weights: Tensors, adam: AdamState, numbers: tuple[Any, ...], batch: Any, share: Tensor
    ) -> Tensors:
        gradient, values, *reports = self._eager_slope(weights, numbers, batch, share)
        return self._finish(weights[0], gradient, adam, numbers[0], values), *reports

    def _graph(
        self, weights: Tensors, adam: AdamState, numbers: Tensors, batch: Any, share: Tensor
    ) -> Tensors:
        """Compute the same as one function of its arguments, which can be compiled."""
        gradient, values, *reports = self._graph_slope(weights, numbers, batch, share)
        told = self._finish(weights[0], gradient, adam, numbers[0], values, in_graph=True)
        return told, *reports

    def _eager_slope(
        self, weights: Tensors, numbers: tuple[Any, ...], batch: Any, share: Tensor
    ) -> Tensors:
        """Return gradient [P], metrics [K] and reports [B]."""
        # The modules' parameters are views of all these weights, and their gradients of one tensor:
        # autograd accumulates straight into it.
        del weights
        gradient = self.network.gradient.zero_()
        pieces = []
        for piece, part in self._pieces(batch, share):
            rows = self._recipe.loss(*self._forwards, piece, *numbers[1:])
            torch.dot(rows.loss, part).backward()  # type: ignore[no-untyped-call]
            pieces.append(rows.told(part))
        return gradient, *(pieces[0] if len(pieces) == 1 else together(pieces))

    def _graph_slope(
        self, weights: Tensors, numbers: Tensors, batch: Any, share: Tensor
    ) -> Tensors:
        learned, *frozen = weights

        def loss(own: Tensor, piece: Any, part: Tensor) -> tuple[Tensor, RowLoss]:
            pairs = zip(self._networks, (own, *frozen), strict=True)
            networks = [network.function(values) for network, values in pairs]
            rows = self._recipe.loss(*networks, piece, *numbers[1:])
            return torch.dot(rows.loss, part), rows

        slopes, pieces = [], []
        for piece, part in self._pieces(batch, share):
            slope, (_, rows) = grad_and_value(loss, has_aux=True)(learned, piece, part)
            slopes.append(slope)
            pieces.append(rows.told(part))
        return sum(slopes[1:], slopes[0]), *(pieces[0] if len(pieces) == 1 else together(pieces))

    def _pieces(self, batch: Any, share: Tensor) -> list[tuple[Any, Tensor]]:
        """Prepare the batch as a whole, then cut it; return pieces and their rows' shares."""
        if self._recipe.prepare is not None:
            batch = self._recipe.prepare(batch, share)
        count = self._recipe.grad_accumulation
        return [(batch, share)] if count == 1 else cut(batch, share, count)

    @torch.no_grad()
    def _finish(
        self,
        weights: Tensor,
        gradient: Tensor,
        adam: AdamState,
        rate: Tensor,
        values: Tensor,
        *,
        in_graph: bool = False,
    ) -> Tensor:
        """Step along the gradient; return the metrics [K] and its norm."""
        norm = clip_(gradient, self._recipe.max_grad_norm, looking=self._seen and not in_graph)
        limit = self._recipe.limit
        before = [] if limit is None else [tensor.clone() for tensor in (weights, *adam)]
        step_ = written_out_ if in_graph else adam_
        step_(weights, gradient, adam, rate, epsilon=self._recipe.epsilon)
        if limit is not None:
            # Undo the step where it starts beyond the limit, without asking the device.
            keep = values[self._names.index(limit[0])] <= limit[1]
            for now, then in zip((weights, *adam), before, strict=True):
                now.copy_(torch.where(keep, now, then))
        return torch.cat((values, norm.unsqueeze(0)))
