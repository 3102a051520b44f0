"""Training metrics: detached when recorded (no autograd graph), summed on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsFloat

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.core.errors import NonFiniteError
from steadyrl.core.saved_state import COUNT, Limits, Saved
from steadyrl.core.state import Stateful


@dataclass(frozen=True, slots=True, eq=False)
class Metrics:
    """K named scalars as one tensor [K] on its device, always detached."""

    names: tuple[str, ...]
    values: Tensor  # [K]

    def __post_init__(self) -> None:
        if self.values.shape != (len(self.names),):
            shape = tuple(self.values.shape)
            raise ValueError(f"{len(self.names)} metric names but values of shape {shape}")
        if self.values.requires_grad:
            object.__setattr__(self, "values", self.values.detach())


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
    """Sums of the metrics of steps, and their means over the steps since the last call."""

    state_names = ("sums", "summed")
    state_limits: ClassVar[Mapping[str, Limits]] = {"summed": COUNT}

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names, self.summed = names, 0
        self.sums = torch.zeros(len(names), device=device)

    def add(self, values: Tensor) -> bool:
        """Add the metrics [K] of a step; return False if the loss is known not to be finite.

        Only the host is checked: reading a number of a device would synchronise it.
        """
        self.summed += 1
        if self.summed == 1:
            self.sums.copy_(values)
        else:
            self.sums += values
        return not self.sums.is_cpu or math.isfinite(self.sums[0].item())

    def __call__(self, others: Mapping[str, Tensor] | None = None) -> Metrics | None:
        """Return the means since the last call and `others` []; None if there are neither."""
        if not self.summed:
            return Metrics(tuple(others), torch.stack(list(others.values()))) if others else None
        names, values = self.names, self.sums / self.summed
        if others:
            names = (*names, *others)
            values = torch.cat((values, torch.stack(list(others.values()))))
        self.summed = 0
        return Metrics(names, values)


@dataclass(slots=True)
class _Sum:
    """Running sum of the metrics that share one tuple of names."""

    total: Tensor  # [K] float64, allocated once
    count: int


class MetricAccumulator(Stateful):
    """Means over a log interval: summed on the device, read with one transfer to the host."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], _Sum] = {}

    def add(self, metrics: Metrics) -> None:
        """Add one update's metrics; different updates may report different names."""
        known = self._sums.get(metrics.names)
        if known is None:
            total = torch.zeros_like(metrics.values, dtype=torch.float64)
            known = self._sums[metrics.names] = _Sum(total, 0)
        elif known.total.device != metrics.values.device:  # loaded from a checkpoint
            known.total = known.total.to(metrics.values.device)
        known.total.add_(metrics.values)
        known.count += 1

    def flush(self, *, check_step: int | None = None) -> dict[str, float]:
        """Return the mean of every metric and start a new interval; one transfer to the host.

        With `check_step`, a mean that is not finite raises NonFiniteError with its name and step.
        """
        # Name sets without an update in the whole interval are dropped, so this dict is bounded.
        self._sums = {names: known for names, known in self._sums.items() if known.count}
        if not self._sums:
            return {}
        totals = iter(torch.cat([known.total for known in self._sums.values()]).tolist())
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for names, known in self._sums.items():
            for name in names:
                sums[name] = sums.get(name, 0.0) + next(totals)
                counts[name] = counts.get(name, 0) + known.count
            known.total.zero_()
            known.count = 0
        means = {name: total / counts[name] for name, total in sums.items()}
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
            {"names": list(names), "total": known.total.clone(), "count": known.count}
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


def _sum_in(saved: Saved) -> tuple[tuple[str, ...], _Sum]:
    """Return the names of a saved sum, and the sum."""
    names = saved.raw("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("sums.names: not a list of names")
    total = saved.tensor("total", (len(names),), torch.float64)
    return tuple(names), _Sum(total.clone(), saved.whole("count", 1))
