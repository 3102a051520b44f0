"""Priorities on an accelerator: leaves in about √n blocks, sampled in two parallel scans.

A sum tree would need several kernel launches per level. Here a batch of draws is one scan over the
block sums and one scan within the drawn blocks, without a host synchronisation. Sums are
recomputed, never adjusted, and a leaf of 0 cannot be drawn however a parallel scan rounds. Host
scalars are passed as kernel arguments (`masked_fill`, `index_fill_`), never as operands: an operand
would be copied to the device, and that copy synchronises.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.buffers.replay.sum_tree import EPSILON, check_shapes, invalid_update, load_priorities
from steadyrl.core.cuda_graph import CudaGraphed, host_sees


def first_beyond(sums: Tensor, values: Tensor, target: Tensor) -> Tensor:
    """Return the first index whose running sum exceeds `target` [B], as a tensor [B].

    sums and values: [K] or [B, K]. Entries with value 0 are skipped; if rounding leaves no sum
    above the target, the index is that of the last entry that is not 0.
    """
    positive = values > 0
    beyond = (sums > target[:, None]) & positive
    first = beyond.byte().argmax(-1)
    places = torch.arange(values.shape[-1], device=values.device)
    last = (places * positive).amax(-1)
    return torch.where(beyond.any(-1), first, last)


def running_sums(values: Tensor) -> Tensor:
    """Return the cumulative sum over the last axis, deterministic where torch is asked to be.

    CUDA's `cumsum` adds in a varying order; the deterministic version doubles the summed range in
    every step (Hillis & Steele 1986).
    """
    if host_sees(values) or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(-1)
    behind = 1
    while behind < values.shape[-1]:
        further = values[..., behind:] + values[..., :-behind]
        values = torch.cat((values[..., :behind], further), -1)
        behind *= 2
    return values


class BlockSums:
    """Sample transition ids in proportion to their priorities, with torch operations only."""

    def __init__(
        self, slots: int, alpha: float, device: torch.device, *, cuda_graph: bool = False
    ) -> None:
        """Allocate `slots` priorities; `cuda_graph`: updates are replayed as one CUDA graph."""
        blocks, width = self._shape(slots)
        self.alpha, self.slots, self._device, self._width = alpha, slots, device, width
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._leaves = torch.zeros((blocks, width), **options)
        self._flat = self._leaves.view(-1)
        self._sums = torch.zeros(blocks, **options)
        self._minima = torch.full((blocks,), math.inf, **options)
        self._max_priority = torch.ones((), **options)  # the largest raw priority seen
        self._deferred = DeferredCheck(device)
        self._apply = (
            CudaGraphed(self._apply_update, "a priority update")
            if cuda_graph
            else self._apply_update
        )

    @staticmethod
    def _shape(slots: int) -> tuple[int, int]:
        width = 1 << math.ceil(math.log2(slots) / 2)
        return -(-slots // width), width

    @classmethod
    def bytes_needed(cls, slots: int) -> int:
        """Return the bytes that priorities of `slots` ids take."""
        blocks, width = cls._shape(slots)
        return 8 * (blocks * width + 2 * blocks + 1)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(p.nbytes for p in (self._leaves, self._sums, self._minima, self._max_priority))

    def add_and_evict(self, added: Tensor, evicted: Tensor) -> None:
        """Give new ids the largest priority seen so far, and evicted ids the priority 0."""
        self._flat[added] = self._max_priority**self.alpha
        self._flat.index_fill_(0, evicted, 0.0)
        self._refresh(torch.cat((added, evicted)))

    @staticmethod
    def draw_inputs(uniform: NDArray[np.float64], beta: float) -> NDArray[np.float64]:
        """Return the host inputs of a draw as one array [B + 1]: stratified uniforms and −β."""
        strata = (np.arange(len(uniform)) + uniform) / len(uniform)
        return np.append(strata, -beta)

    def draw(self, draw_inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids [B] and importance weights [B] for `draw_inputs` [B + 1]."""
        sums = running_sums(self._sums)
        target = draw_inputs[:-1] * sums[-1]
        block = first_beyond(sums, self._sums, target)
        target = target - (sums[block] - self._sums[block])
        leaves = self._leaves[block]
        place = first_beyond(running_sums(leaves), leaves, target)
        priority = leaves.gather(1, place[:, None])[:, 0]
        weight = (priority / self._minima.amin()) ** draw_inputs[-1]
        return block * self._width + place, weight.float()

    def update(self, index: Tensor, td_error: Tensor) -> None:
        """Set leaves to p^α, p = |δ| + ε, for the drawn ids that have not been evicted since."""
        check_shapes(index, td_error)
        index = index.to(self._device)
        self._deferred.raise_if_invalid(index, td_error, self.slots)
        self._apply(index, td_error)
        self._deferred.publish()

    def _apply_update(self, index: Tensor, td_error: Tensor) -> None:
        error = td_error.detach().to(self._device, torch.float64)
        finite = self._deferred.check(index, error)
        raw = error.abs() + EPSILON
        current = self._flat[index]
        changes = (current > 0) & finite
        self._flat[index] = torch.where(changes, raw**self.alpha, current)
        self._max_priority.copy_(raw.masked_fill(~finite, 0.0).amax().maximum(self._max_priority))
        self._refresh(index)

    @property
    def min_probability(self) -> float:
        """Smallest sampling probability of any id; synchronises with the device."""
        return (self._minima.amin() / self._sums.sum()).item()

    @property
    def max_priority(self) -> float:
        """The largest |δ| + ε seen; synchronises with the device."""
        return self._max_priority.item()

    @max_priority.setter
    def max_priority(self, value: float) -> None:
        self._max_priority.fill_(value)

    def clear(self) -> None:
        """Reset all priorities."""
        self._leaves.zero_()
        self._sums.zero_()
        self._minima.fill_(math.inf)
        self._max_priority.fill_(1.0)

    def state_dict(self, count: int) -> dict[str, Any]:
        """Return the first `count` priorities and the largest |δ| + ε seen."""
        return {"leaves": self._flat[:count], "max_priority": self._max_priority.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; sums are recomputed and equal the saved ones bit for bit."""
        self.clear()
        max_priority, leaves = load_priorities(state, self.slots, self.alpha)
        self._flat[: len(leaves)] = leaves.to(self._device)
        self._max_priority.fill_(max_priority)
        self._refresh(torch.arange(0, len(leaves), self._width, device=self._device))

    def _refresh(self, index: Tensor) -> None:
        """Recompute the block sums and minima of these ids; repeated ids are harmless."""
        block: Tensor | slice = index // self._width
        if len(index) >= len(self._sums):  # all blocks are fewer than one for each id
            block = slice(None)
        leaves = self._leaves[block]
        self._sums[block] = leaves.sum(1)
        self._minima[block] = leaves.masked_fill(leaves <= 0, math.inf).amin(1)


class DeferredCheck:
    """Check TD errors [B] for NaN and infinity without synchronising with the device.

    On the CPU an invalid error raises at once. On a device its update is skipped at once, and a
    later call raises, after the report has been copied to the host asynchronously.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        # Found one?, and the first one's position in the batch, id and error. Stays once set.
        self._first = torch.zeros(4, dtype=torch.float64, device=device)
        self._host_report = torch.zeros(4, dtype=torch.float64, pin_memory=cuda)
        self._copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def raise_if_invalid(self, index: Tensor, error: Tensor, slots: int) -> None:
        """Raise for a non-finite error in this batch (CPU) or in an earlier one (device)."""
        if host_sees(error):
            wrong = ~error.isfinite() | (index < 0) | (index >= slots)
            if wrong.any():
                place = int(wrong.byte().argmax())
                raise invalid_update(place, int(index[place]), float(error[place]), slots)
        elif (self._copied is None or self._copied.query()) and self._host_report[0]:
            _, place, which, value = self._host_report.tolist()
            raise invalid_update(int(place), int(which), value, slots)

    def check(self, index: Tensor, error: Tensor) -> Tensor:
        """Return the mask [B] of finite errors, and record the first error that is not."""
        finite = error.isfinite()
        first = (~finite).byte().argmax(keepdim=True)  # [1]: indexing with it does not synchronise
        parts = ((~finite).any()[None], first, index[first], error[first])
        seen = torch.cat([part.double() for part in parts])
        self._first.copy_(torch.where(self._first[0] > 0, self._first, seen))
        return finite

    def publish(self) -> None:
        """Copy the report to the host, asynchronously."""
        if not host_sees(self._first):
            self._host_report.copy_(self._first, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._first.device))
