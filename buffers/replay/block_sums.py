"""Priorities on an accelerator: leaves in about √n blocks, drawn in two wide steps.

A deep tree would cost several launches a level; here a draw is a scan over the block sums and a
scan over one block, for all draws at once and without asking the host. Sums are recomputed, never
adjusted, and a leaf of 0 cannot be drawn whatever the rounding of a parallel scan. Scalars of the
host are arguments of kernels here (`masked_fill`, `index_fill_`), never operands: those would be
copied to the device, and the copy waited for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.buffers.replay.sum_tree import EPSILON, check_shapes, priorities_in, refuse
from steadyrl.core.cuda_graph import Recorded, host_sees


def first_beyond(sums: Tensor, values: Tensor, target: Tensor) -> Tensor:
    """Return per row of `target` [B] the first place whose running sum is beyond it, [B].

    sums and values [K] or [B, K]; places with value 0 are passed over, and where rounding leaves
    nothing beyond the target it is the last place that is not 0.
    """
    positive = values > 0
    beyond = (sums > target[:, None]) & positive
    first = beyond.byte().argmax(-1)
    places = torch.arange(values.shape[-1], device=values.device)
    last = (places * positive).amax(-1)
    return torch.where(beyond.any(-1), first, last)


def running_sums(values: Tensor) -> Tensor:
    """Return Σ of all up to each place of the last axis.

    A card's own scan adds in an order that varies; where that is not allowed, ranges are doubled.
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
    """Draw ids in proportion to their priorities with torch operations only."""

    def __init__(
        self, slots: int, alpha: float, device: torch.device, *, recorded: bool = False
    ) -> None:
        """Make room for `slots` ids; `recorded`: an update of theirs is played with one launch."""
        blocks, width = self._shape(slots)
        self.alpha, self.slots, self._device, self._width = alpha, slots, device, width
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._leaves = torch.zeros((blocks, width), **options)
        self._flat = self._leaves.view(-1)
        self._sums = torch.zeros(blocks, **options)
        self._minima = torch.full((blocks,), math.inf, **options)
        self._peak = torch.ones((), **options)  # the largest raw priority seen
        self._deferred = DeferredCheck(device)
        self._set = Recorded(self._take, "what priorities become") if recorded else self._take

    @staticmethod
    def _shape(slots: int) -> tuple[int, int]:
        width = 1 << math.ceil(math.log2(slots) / 2)
        return -(-slots // width), width

    @classmethod
    def bytes_needed(cls, slots: int) -> int:
        """Return the bytes of the priorities of `slots` ids."""
        blocks, width = cls._shape(slots)
        return 8 * (blocks * width + 2 * blocks + 1)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(p.nbytes for p in (self._leaves, self._sums, self._minima, self._peak))

    def revise(self, born: Tensor, dead: Tensor) -> None:
        """Let new ids in at the largest priority seen, and dead ones out."""
        self._flat[born] = self._peak**self.alpha
        self._flat.index_fill_(0, dead, 0.0)
        self._refresh(torch.cat((born, dead)))

    @staticmethod
    def asked(uniform: NDArray[np.float64], beta: float) -> NDArray[np.float64]:
        """Return what a draw is told by the host, in one piece: a share of all each, and −β."""
        strata = (np.arange(len(uniform)) + uniform) / len(uniform)
        return np.append(strata, -beta)

    def draw(self, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Return one id and its importance weight per share that is `asked` for, [B] each."""
        sums = running_sums(self._sums)
        target = asked[:-1] * sums[-1]
        block = first_beyond(sums, self._sums, target)
        target = target - (sums[block] - self._sums[block])
        leaves = self._leaves[block]
        place = first_beyond(running_sums(leaves), leaves, target)
        priority = leaves.gather(1, place[:, None])[:, 0]
        weight = (priority / self._minima.amin()) ** asked[-1]
        return block * self._width + place, weight.float()

    def update(self, index: Tensor, td_error: Tensor) -> None:
        """Set p = (|δ| + ε)^α for the drawn ids that are still alive."""
        check_shapes(index, td_error)
        index = index.to(self._device)
        self._deferred.refuse_wrong(index, td_error, self.slots)
        self._set(index, td_error)
        self._deferred.tell()

    def _take(self, index: Tensor, td_error: Tensor) -> None:
        error = td_error.detach().to(self._device, torch.float64)
        finite = self._deferred.look(index, error)
        raw = error.abs() + EPSILON
        current = self._flat[index]
        changes = (current > 0) & finite
        self._flat[index] = torch.where(changes, raw**self.alpha, current)
        self._peak.copy_(raw.masked_fill(~finite, 0.0).amax().maximum(self._peak))
        self._refresh(index)

    @property
    def rarest(self) -> float:
        """Probability of the id that is least likely to be drawn; waits for the device."""
        return (self._minima.amin() / self._sums.sum()).item()

    @property
    def peak(self) -> float:
        """The largest raw priority seen; waits for the device."""
        return self._peak.item()

    @peak.setter
    def peak(self, value: float) -> None:
        self._peak.fill_(value)

    def clear(self) -> None:
        """Forget all priorities."""
        self._leaves.zero_()
        self._sums.zero_()
        self._minima.fill_(math.inf)
        self._peak.fill_(1.0)

    def state_dict(self, count: int) -> dict[str, Any]:
        """Return the first `count` priorities and the largest error seen."""
        return {"leaves": self._flat[:count], "peak": self._peak.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; sums are recomputed, bit for bit."""
        self.clear()
        peak, leaves = priorities_in(state, self.slots, self.alpha)
        self._flat[: len(leaves)] = leaves.to(self._device)
        self._peak.fill_(peak)
        self._refresh(torch.arange(0, len(leaves), self._width, device=self._device))

    def _refresh(self, index: Tensor) -> None:
        """Recompute the blocks of these ids; an id named twice gives the same sum twice."""
        block = index // self._width
        leaves = self._leaves[block]
        self._sums[block] = leaves.sum(1)
        self._minima[block] = leaves.masked_fill(leaves <= 0, math.inf).amin(1)


class DeferredCheck:
    """Look at errors [B] as they come.

    On the CPU a wrong one raises at once. On a device it is left out at once and raises at one of
    the next calls, when the news has reached the host by itself.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        # Whether there was a wrong one; the first: its place, id and error. Stays once set.
        self._first = torch.zeros(4, dtype=torch.float64, device=device)
        self._news = torch.zeros(4, dtype=torch.float64, pin_memory=cuda)
        self._sent = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def refuse_wrong(self, index: Tensor, error: Tensor, slots: int) -> None:
        """Raise for an error that is not finite: one of these, or seen before on a device."""
        if host_sees(error):
            wrong = ~error.isfinite() | (index < 0) | (index >= slots)
            if wrong.any():
                place = int(wrong.byte().argmax())
                raise refuse(place, int(index[place]), float(error[place]), slots)
        elif (self._sent is None or self._sent.query()) and self._news[0]:
            _, place, which, value = self._news.tolist()
            raise refuse(int(place), int(which), value, slots)

    def look(self, index: Tensor, error: Tensor) -> Tensor:
        """Return which errors are finite, [B], and remember the first that is not."""
        finite = error.isfinite()
        first = (~finite).byte().argmax(keepdim=True)  # [1]; indexing with it asks nothing back
        parts = ((~finite).any()[None], first, index[first], error[first])
        seen = torch.cat([part.double() for part in parts])
        self._first.copy_(torch.where(self._first[0] > 0, self._first, seen))
        return finite

    def tell(self) -> None:
        """Let the host know, once the device comes to it."""
        if not host_sees(self._first):
            self._news.copy_(self._first, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._first.device))
