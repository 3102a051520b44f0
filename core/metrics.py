"""Training metrics: detached when recorded (no autograd graph), summed on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, SupportsFloat

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.core.errors import NonFiniteError
from steadyrl.core.saved_state import COUNT, Limits, Saved
from steadyrl.core.state import Stateful

LARGEST = "_max"  # ends the name of a metric whose largest value of an interval counts


@dataclass(frozen=True, slots=True, eq=False)
class Metrics:
    """K named scalars as one tensor [K] on its device, always detached."""

    names: tuple[str, ...]
    values: Tensor  # [K]
    counts: tuple[int, ...] = ()  # of how many updates each is the mean; 1 if not given

    def __post_init__(self) -> None:
        if not self.counts:
            object.__setattr__(self, "counts", (1,) * len(self.names))
        if len(self.counts) != len(self.names):
            raise ValueError(f"{len(self.names)} metric names but {len(self.counts)} counts")
        if self.values.shape != (len(self.names),):
            shape = tuple(self.values.shape)
            raise ValueError(f"{len(self.names)} metric names but values of shape {shape}")
        if self.values.requires_grad:
            object.__setattr__(self, "values", self.values.detach())

    def by_count(self) -> Iterator[tuple[tuple[str, ...], Tensor, int]]:
        """Yield names, values and count of metrics side by side that have the same count."""
        if len(set(self.counts)) == 1:  # nothing to split
            yield self.names, self.values, self.counts[0]
            return
        begin = 0
        for count, run in groupby(self.counts):
            end = begin + len(list(run))
            yield self.names[begin:end], self.values[begin:end], count
            begin = end


def record(names: Sequence[str], *values: Tensor | SupportsFloat) -> Metrics:
    """Stack K scalars into metrics, detached, on the device of the tensors among them."""
    device = next((each.device for each in values if isinstance(each, Tensor)), None)
    # float32: half-precision sums would lose digits.
    numbers = [
        each.detach().reshape(()).float()
        if isinstance(each, Tensor)
        else torch.tensor(float(each), device=device)
        for each in values
    ]
    return Metrics(tuple(names), torch.stack(numbers))


class MetricMeans(Stateful):
    """Means of metrics since the last call; the last one is the largest value of the first.

    They count as often as there were steps; what else is given then counts once.
    """

    state_names = ("sums", "summed")
    state_limits: ClassVar[Mapping[str, Limits]] = {"summed": COUNT}

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names, self.summed = names, 0
        self.sums = torch.zeros(len(names), device=device)
        self._sums, self._largest = self.sums[:-1], self.sums[-1]
        self._counts = torch.ones_like(self.sums)  # the largest is divided by 1

    def add(self, values: Tensor) -> bool:
        """Add the metrics [K-1] of a step; return False if the loss is known not to be finite.

        Only the host is checked: reading a number of a device would synchronise it.
        """
        self.summed += 1
        loss = values[0]
        if self.summed == 1:
            self._sums.copy_(values)
            self._largest.copy_(loss)
        else:
            self._sums.add_(values)
            torch.maximum(self._largest, loss, out=self._largest)
        return not loss.is_cpu or math.isfinite(loss.item())

    def __call__(self, others: Mapping[str, Tensor] | None = None) -> Metrics | None:
        """Return the means since the last call and `others` []; None if there are neither."""
        if not self.summed:
            return Metrics(tuple(others), torch.stack(list(others.values()))) if others else None
        names, values = self.names, self.sums
        counts = (self.summed,) * len(names)
        if self.summed == 1:
            values = values.clone()
        else:
            self._counts[:-1].fill_(self.summed)
            values = values / self._counts
        if others:
            names, counts = (*names, *others), (*counts, *(1 for _ in others))
            values = torch.cat((values, torch.stack(list(others.values()))))
        self.summed = 0
        return Metrics(names, values, counts)


@dataclass(slots=True)
class _Sum:
    """Running sum of the metrics that share one tuple of names."""

    total: Tensor  # [K] float64, allocated once
    count: int
    largest: dict[int, Tensor]  # [] float32, by the index of each metric whose largest counts

    @classmethod
    def of(cls, names: tuple[str, ...], values: Tensor) -> _Sum:
        """Return an empty sum for values like these."""
        largest = {
            at: values.new_empty((), dtype=torch.float32)
            for at, name in enumerate(names)
            if name.endswith(LARGEST)
        }
        return cls(torch.zeros_like(values, dtype=torch.float64), 0, largest)

    def add(self, values: Tensor, count: int) -> None:
        """Add values [K], means of `count` updates."""
        self.total.add_(values, alpha=count)
        self.count += count
        for at, largest in self.largest.items():
            if self.count == count:
                largest.copy_(values[at])
            else:
                torch.maximum(largest, values[at], out=largest)

    def to(self, device: torch.device) -> None:
        """Move it to a device."""
        self.total = self.total.to(device)
        self.largest = {at: value.to(device) for at, value in self.largest.items()}

    def result(self) -> Tensor:
        """Return the totals [K]; of metrics whose largest counts, that times `count`."""
        result = self.total.clone()
        for at, largest in self.largest.items():
            result[at] = largest.double() * self.count  # exact: both have few digits
        return result


class MetricAccumulator(Stateful):
    """Means over a log interval: summed on the device, read with one transfer to the host.

    Of metrics whose name ends with "_max" it is the largest.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], _Sum] = {}

    def add(self, metrics: Metrics) -> None:
        """Add metrics, weighted by their counts; the names may differ from one call to the next."""
        for names, values, count in metrics.by_count():
            device, known = values.device, self._sums.get(names)
            if known is None:
                known = self._sums[names] = _Sum.of(names, values)
                self._move_to(device)
            elif known.total.device != device:
                self._move_to(device)
            known.add(values, count)

    def _move_to(self, device: torch.device) -> None:
        """Move all sums, as those loaded from a checkpoint are on the host."""
        for each in self._sums.values():
            each.to(device)

    def flush(self, *, check_step: int | None = None) -> dict[str, float]:
        """Return the mean of every metric and start a new interval; one transfer to the host.

        With `check_step`, a mean that is not finite raises NonFiniteError with its name and step.
        """
        # Name sets without an update in the whole interval are dropped, so this dict is bounded.
        self._sums = {names: known for names, known in self._sums.items() if known.count}
        if not self._sums:
            return {}
        totals = iter(torch.cat([known.result() for known in self._sums.values()]).tolist())
        found: dict[str, list[tuple[float, int]]] = {}
        for names, known in self._sums.items():
            for name in names:
                found.setdefault(name, []).append((next(totals), known.count))
            known.total.zero_()
            known.count = 0
        means = {name: _combined(name, parts) for name, parts in found.items()}
        for name, mean in means.items():
            if check_step is not None and not math.isfinite(mean):
                raise NonFiniteError(
                    f"{name} is {mean} at step {check_step:,}: the training diverged; "
                    "try a smaller agent.learning_rate or agent.max_grad_norm"
                )
        return means

    @override
    def state_dict(self) -> dict[str, Any]:
        sums = [
            {"names": list(names), "total": known.result(), "count": known.count}
            for names, known in self._sums.items()
            if known.count
        ]
        return {"sums": sums}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = Saved(state, "metrics").raw("sums")
        if not isinstance(saved, list):
            raise ValueError(f"sums: saved as {type(saved).__name__}, here it is a list")
        self._sums = dict(_sum_in(Saved(each, "sums")) for each in saved)


def _combined(name: str, parts: list[tuple[float, int]]) -> float:
    """Return the mean of (total, count) pairs, or the largest of their means."""
    if name.endswith(LARGEST):
        return max(total / count for total, count in parts)
    return sum(total for total, _ in parts) / sum(count for _, count in parts)


def _sum_in(saved: Saved) -> tuple[tuple[str, ...], _Sum]:
    """Return the names of a saved sum, and the sum."""
    names = saved.raw("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("sums.names: not a list of names")
    total = saved.tensor("total", (len(names),), torch.float64)
    known = _Sum.of(tuple(names), total)
    known.total, known.count = total.clone(), saved.whole("count", 1)
    for at, largest in known.largest.items():
        largest.copy_(total[at] / known.count)
    return tuple(names), known
