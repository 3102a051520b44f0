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

from steadyrl.agents.engine.engine import Mode, compiled
from steadyrl.agents.engine.inductor import Compiled
from steadyrl.agents.learner.adam import (
    MOST_COUNTED,
    AdamState,
    adam_,
    adam_state,
    clip_,
    written_out_,
)
from steadyrl.agents.learner.all_reduce import Together
from steadyrl.agents.learner.comm import World
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.interrupt import CutShortError, Stop
from steadyrl.agents.learner.loss_spec import Numbers, Recipe, RowLoss, Tensors
from steadyrl.agents.learner.minibatch import Padding, cut, together
from steadyrl.agents.learner.precision import Forward, Precision, learned_in, read_in
from steadyrl.core.cuda_graph import host_sees
from steadyrl.core.errors import NonFiniteError
from steadyrl.core.metrics import Metrics
from steadyrl.core.saved import COUNT, Limits
from steadyrl.core.state import Stateful

LARGEST_SQUARE, SMALLEST_SQUARE = 1e30, 1e-30  # of gradients; smaller ones vanish in float32


@torch.no_grad()
def told(rows: RowLoss, share: Tensor) -> Tensors:
    """Return the means [K] of losses and metrics by the rows' shares [B], and the reports."""
    return torch.mv(torch.stack((rows.loss, *rows.metrics)), share), *rows.reports


class Means(Stateful):
    """The metrics of steps, added up until somebody asks for their means."""

    state_names = ("sums", "summed")
    state_limits: ClassVar[Mapping[str, Limits]] = {"summed": COUNT}

    def __init__(self, names: tuple[str, ...], device: torch.device, *, fresh: bool) -> None:
        self.names, self.summed = names, 0
        self.sums = torch.zeros(len(names), device=device)
        # `fresh`: each step's numbers are a tensor of their own.
        self._seen: Any = self.sums.numpy() if fresh and host_sees(self.sums) else None

    def add(self, values: Tensor) -> bool:
        """Add the metrics [K] of a step; say whether all losses were finite, if a look is free."""
        self.summed += 1
        if self._seen is None:  # a device's, where a recorded graph writes the next ones as well
            (self.sums.copy_ if self.summed == 1 else self.sums.add_)(values)
            return True
        # Between graphs' turns caches are cold: what is small is cheapest by NumPy, or not done.
        if self.summed == 1:
            self.sums, self._seen = values, values.numpy()
        else:
            self._seen += values.numpy()
        return math.isfinite(self._seen[0])

    def __call__(self, others: Mapping[str, Tensor] | None = None) -> Metrics | None:
        """Return the means since the last call, and `others` []; None where there are neither."""
        if not self.summed:
            return Metrics(tuple(others), torch.stack(list(others.values()))) if others else None
        names, many = self.names, self.summed
        values = self.sums / many if many > 1 or self._seen is None else self.sums
        if others:
            names = (*names, *others)
            values = torch.cat((values, torch.stack(list(others.values()))))
        self.summed = 0
        return Metrics(names, values)


class Arguments:
    """What a step is told besides weights: in the same tensors always, where a graph reads them."""

    def __init__(self, device: torch.device, rows: int | None, *, fixed: bool) -> None:
        self.padding = Padding(rows) if fixed and rows else None
        self._fixed = fixed
        self._told: Numbers = ()  # what the tensors hold
        self._tensors: tuple[Tensor, ...] = ()
        self._share = torch.empty(0, device=device)

    def of(
        self, batch: Any, share: float | Tensor | None, rate: float, numbers: Numbers
    ) -> tuple[Numbers, Any, Tensor]:
        """Return rate and numbers, the batch, and what each of its rows counts for."""
        own = self._kept(rate, *numbers) if self._fixed else (*self._kept(rate), *numbers)
        if isinstance(share, Tensor):  # who says it row by row has brought them to one size
            self._share = share
        elif self.padding is not None:
            batch, self._share = self.padding(batch, share)
        elif share is not None or len(self._share) != len(batch[0]):
            each = 1 / len(batch[0]) if share is None else share
            self._share = self._share.new_full((len(batch[0]),), each)
        return own, batch, self._share

    def _kept(self, *numbers: float | Tensor) -> tuple[Tensor, ...]:
        """Return the numbers as tensors, which are written to only where they change."""
        if not self._tensors:
            self._told = (math.nan,) * len(numbers)  # equal to no number
            self._tensors = tuple(self._share.new_empty(torch.as_tensor(n).shape) for n in numbers)
        for tensor, number, before in zip(self._tensors, numbers, self._told, strict=True):
            if isinstance(number, Tensor):
                tensor.copy_(number)
            elif number != before:
                tensor.fill_(number)
        self._told = numbers
        return self._tensors


class Learner(Stateful):
    """Holds a network's optimiser; every step changes its weights and gives the rows' reports."""

    state_names = ("network", "adam", "updates", "means")
    state_limits: ClassVar[Mapping[str, Limits]] = {"updates": COUNT}

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
        self.updates = 0  # steps that were taken
        self.exceeded = False  # the last one was beyond the limit, and was not
        self.stop = Stop()
        # What one row of a batch counts for; None: its part of these rows, which are all.
        self.share: float | Tensor | None = None  # or of each [B]
        self._recipe, self._mode, self._networks = recipe, mode, (network, *frozen)
        # Themselves, because nothing hooks into these modules and each call costs.
        self._forwards = [n.module.forward for n in self._networks]
        self.forward: Forward = self._forwards[0]  # as updates see it, which may be rounded
        self._seen = host_sees(network.weights)
        names = ("train/loss", *recipe.metrics, "train/grad_norm")
        self.means = Means(names, device, fresh=mode != "cudagraph")
        self._arguments = Arguments(device, recipe.rows, fixed=mode != "eager")
        self.padding = self._arguments.padding  # who makes batches may use its room
        whole = partial(self._whole, True), mode, partial(self._whole, False)
        self._run = compiled(*whole, only_read=(3,))  # the batch: PPO's may be a whole rollout
        self.ready = mode != "compiled"  # else the next step is held up by a compiler

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        steps, most = self.adam.step.item(), min(self.updates, MOST_COUNTED)
        skips = self._recipe.limit is not None  # a step beyond the limit is none of Adam's
        if not (0 <= steps <= most and steps % 1 == 0 and (skips or steps == most)):
            raise ValueError(f"adam.step: is {steps:g} after {self.updates} updates")
        mean, square = self.adam.mean, self.adam.square
        if (square < 0).any() or (square > LARGEST_SQUARE).any():
            raise ValueError(f"adam.square: holds a number that is not 0 to {LARGEST_SQUARE:g}")
        # Of whatever gradients, by Cauchy and Schwarz: (Σ b₁^k g)² ≤ 53 · Σ b₂^k g².
        if (mean.square() > 60 * square + SMALLEST_SQUARE).any():
            raise ValueError("adam.mean: holds a number that no mean of such squares is")

    def compute_in(self, precision: Precision) -> None:
        """Read networks in this precision; before the first step."""
        device, count = self.network.weights.device, len(self._networks)
        loss = learned_in(precision, self._recipe.loss, count, device)
        self._recipe = replace(self._recipe, loss=loss)
        self.forward = read_in(precision, self._forwards[0], device)

    def join(self, world: World) -> None:
        """Take every step together with other ranks, from the weights that rank 0 has.

        Batches come prepared, and with their rows' shares, from who knows those of all ranks.
        """
        self._recipe = replace(self._recipe, prepare=None)
        for network in self._networks:
            network.join(world)
        slope = compiled(self._graph_slope, self._mode, self._eager_slope, only_read=(2,))
        finish = compiled(partial(self._finish, in_graph=True), self._mode, self._finish)
        self._run = Together(slope, finish, world, lambda: self.stop)
        self.ready = self._mode != "compiled"

    def step(self, batch: Any, learning_rate: float, *numbers: float | Tensor) -> Tensors:
        """Take one step on `batch`; return the reports of its rows [B].

        One beyond the limit is not taken, which `exceeded` says. The first one may have to compile,
        which is cut short at once if the run is to end.
        """
        arguments = self._all(batch, learning_rate, numbers)
        if not self.ready:
            self._prepare(arguments)
        metrics, *reports = self._run(*arguments)
        self.exceeded = self._beyond_limit(metrics)
        if self.exceeded:  # it was undone, and is nobody's update
            return tuple(reports)
        self.updates += 1
        # On a device a look at the loss would stall the queue, and the next flush finds it.
        if not self.means.add(metrics):
            raise NonFiniteError(f"train/loss is not finite at update {self.updates}")
        return tuple(reports)

    def prepare(self, batch: Any, learning_rate: float, *numbers: float | Tensor) -> None:
        """Compile for arguments like these, which are only looked at."""
        self._prepare(self._all(batch, learning_rate, numbers))

    def _prepare(self, arguments: tuple[Any, ...]) -> None:
        if isinstance(self._run, Compiled | Together):
            with self.stop.at_once():
                self._run.build(arguments)
        self.ready = True

    def _all(self, batch: Any, rate: float, numbers: Numbers) -> tuple[Any, ...]:
        weights = tuple(network.weights for network in self._networks)
        return weights, self.adam, *self._arguments.of(batch, self.share, rate, numbers)

    @contextmanager
    def all_or_nothing(self, *others: Tensor) -> Iterator[None]:
        """Take back all steps, their counts and what `others` held, if CutShortError ends them."""
        tensors = (self.network.weights, *self.network.module.buffers(), *self.adam, *others)
        before = [tensor.clone() for tensor in tensors]
        counts = (self.updates, self.means.summed, self.means.sums.clone())
        try:
            yield
        except CutShortError:
            self.updates, self.means.summed, sums = counts
            with torch.no_grad():
                for tensor, value in zip((*tensors, self.means.sums), (*before, sums), strict=True):
                    tensor.copy_(value)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, their gradient and the optimiser's moments."""
        return self.network.nbytes + self.adam.mean.nbytes + self.adam.square.nbytes

    @property
    def rounds(self) -> bool:
        """Whether updates read the network in other numbers than who acts."""
        return self.forward is not self._forwards[0]

    def _beyond_limit(self, metrics: Tensor) -> bool:
        """Return whether a step with these metrics [K] was; asks the device only for a limit."""
        limit = self._recipe.limit
        return limit is not None and metrics[self.means.names.index(limit[0])].item() > limit[1]

    def _whole(self, in_graph: bool, *arguments: Any) -> Tensors:
        """Compute and take a step; in a graph as one function of tensors, to be compiled."""
        weights, adam, numbers, batch, share = arguments
        slope = self._graph_slope if in_graph else self._eager_slope
        gradient, values, *reports = slope(weights, numbers, batch, share)
        step = weights[0], gradient, adam, numbers[0], values
        return self._finish(*step, in_graph=in_graph), *reports

    @torch.enable_grad()  # an environment in this process may have switched it off
    def _eager_slope(
        self, _: Tensors, numbers: tuple[Any, ...], batch: Any, share: Tensor
    ) -> Tensors:
        """Return gradient [P], metrics [K] and reports [B]."""
        # Parameters are views of these weights, and their gradients of one that it adds to.
        gradient = self.network.gradient.zero_()
        pieces = []
        for piece, part in self._pieces(batch, share):
            rows = self._recipe.loss(*self._forwards, piece, *numbers[1:])
            # What `Tensor.backward` ends in: the way there takes a twentieth of a small update.
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((rows.loss,), (part,), False, False, (), True, True)
            pieces.append(told(rows, part))
        return gradient, *(pieces[0] if len(pieces) == 1 else together(pieces))

    def _graph_slope(
        self, weights: Tensors, numbers: Tensors, batch: Any, share: Tensor
    ) -> Tensors:
        learned, *frozen = weights
        slopes: list[Tensor] = []
        pieces = []
        for piece, part in self._pieces(batch, share):
            own = learned.detach().requires_grad_()
            pairs = zip(self._networks, (own, *frozen), strict=True)
            networks = [network.function(values) for network, values in pairs]
            with torch.enable_grad():
                rows = self._recipe.loss(*networks, piece, *numbers[1:])
                slopes += torch.autograd.grad(torch.dot(rows.loss, part), own)
            pieces.append(told(rows, part))
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
        """Step along the gradient, if within the limit; return the metrics [K] and its norm."""
        looking, limit = self._seen and not in_graph, self._recipe.limit  # a look is free
        norm = clip_(gradient, self._recipe.max_grad_norm, looking=looking)
        metrics = torch.cat((values, norm.unsqueeze(0)))
        within: Any = limit is None or values[self.means.names.index(limit[0])] <= limit[1]
        if looking and not within:
            return metrics
        undoable = () if looking or limit is None else (weights, *adam)
        before = [(tensor, tensor.clone()) for tensor in undoable]
        step_ = written_out_ if in_graph else adam_
        step_(weights, gradient, adam, rate, epsilon=self._recipe.epsilon)
        for now, then in before:  # without asking the device
            now.copy_(torch.where(within, now, then))
        return metrics
