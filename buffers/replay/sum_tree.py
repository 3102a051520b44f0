"""Priorities on the host: a sum tree whose nodes are cache lines, with a minimum tree on top.

Eight float64 children fill one 64-byte line, so a draw among a million leaves touches seven lines
of which two or three miss the cache. A parent is always recomputed as the sum of its children,
never adjusted, so errors do not accumulate. A leaf of 0 cannot be drawn. Level 0 are the leaves;
every level is padded with zeros to whole lines.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.buffers.transfer import prefetch, touched_zeros
from steadyrl.core.errors import NonFiniteError
from steadyrl.core.jit import compiled
from steadyrl.core.saved import Saved, length

EPSILON = 1e-6  # keeps a transition without error drawable; ε in Schaul et al. 2016, §3.3

LARGEST_ERROR = 4e38  # beyond float32, in which errors are computed
WIDTH = 8  # children of a node
BITS = 3  # log2(WIDTH)

# Sums, minima, and where the levels begin: what compiled code reads and writes of a tree.
Levels = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
NO_LEVELS: Levels = (np.zeros(0), np.zeros(0), np.zeros(0, np.int64))


def check_shapes(index: Tensor | NDArray, td_error: Tensor | NDArray) -> None:
    """Refuse [B, 1] beside [B], which would broadcast to B × B."""
    if index.shape != td_error.shape or index.ndim != 1:
        raise ValueError(
            f"update_priorities: index {tuple(index.shape)} and td_error {tuple(td_error.shape)}"
            " must both be [B]"
        )


def refuse(place: int, index: int, error: float, slots: int) -> Exception:
    """Return the exception for a refused (id, error) pair."""
    if math.isfinite(error):
        return IndexError(f"update_priorities: index[{place}]={index} is not in [0, {slots})")
    return NonFiniteError(
        f"td_error[{place}]={error} for transition {index}: a priority must be a finite number;"
        " lower the learning rate or look for infinite rewards"
    )


def level_offsets(slots: int) -> list[int]:
    """Return where each level begins in the flat array, and the end of the last."""
    offsets, size = [0], slots
    while True:
        lines = -(-size // WIDTH)
        offsets.append(offsets[-1] + lines * WIDTH)
        if lines == 1:
            return offsets
        size = lines


@compiled
def refresh(nodes, minima, offsets, index):  # type: ignore[no-untyped-def]
    """Recompute all ancestors of the leaves in `index`: sums, and minima of what is not 0.

    Ids in rising order share ancestors: one that repeats the last is passed over.
    """
    if offsets.shape[0] == 2:  # a single line has no parent
        return
    last = -1
    for b in range(index.shape[0]):
        parent = index[b] >> BITS
        if parent != last:
            last = parent
            total, smallest = 0.0, np.inf
            for child in range(parent << BITS, (parent + 1) << BITS):
                value = nodes[child]
                total += value
                smallest = value if 0.0 < value < smallest else smallest
            nodes[offsets[1] + parent] = total
            minima[parent] = smallest
    for level in range(1, offsets.shape[0] - 2):
        last = -1
        line, above = offsets[level], offsets[level + 1]
        for b in range(index.shape[0]):
            parent = index[b] >> (BITS * (level + 1))
            if parent != last:
                last = parent
                total, smallest = 0.0, np.inf
                for child in range(line + (parent << BITS), line + ((parent + 1) << BITS)):
                    total += nodes[child]
                    least = minima[child - offsets[1]]
                    smallest = least if least < smallest else smallest
                nodes[above + parent] = total
                minima[above - offsets[1] + parent] = smallest


@compiled
def root_of(nodes, minima, offsets):  # type: ignore[no-untyped-def]
    """Return the sum of all leaves and the smallest that is not 0 (infinite when none is)."""
    levels = offsets.shape[0] - 1
    total, smallest = 0.0, np.inf
    for node in range(offsets[levels - 1], offsets[levels]):
        total += nodes[node]
        if levels > 1:
            smallest = min(smallest, minima[node - offsets[1]])
        elif nodes[node] > 0.0:
            smallest = min(smallest, nodes[node])
    return total, smallest


@compiled
def set_leaves(nodes, minima, offsets, newcomers, born, dead):  # type: ignore[no-untyped-def]
    """Give the born leaves the value of newcomers and the dead ones 0, in this order."""
    nodes[born] = newcomers
    nodes[dead] = 0.0
    refresh(nodes, minima, offsets, born)
    refresh(nodes, minima, offsets, dead)


@compiled
def draw_stratified(nodes, minima, offsets, uniform, beta, target, index, weight):  # type: ignore[no-untyped-def]
    """Draw one leaf from each of B equal parts of the total, in proportion to the leaves.

    target [B] is scratch: what is left to descend.
    weight_i = (P(i) * count)^-β / max_j (P(j) * count)^-β = (p_i / p_min)^-β.
    """
    total, smallest = root_of(nodes, minima, offsets)
    count = index.shape[0]
    for b in range(count):
        index[b] = 0
        target[b] = (b + uniform[b]) / count * total
    # All draws go down a level together, without a branch on what is read, and ask for their
    # next line: it has arrived when their turn comes, where a draw alone would wait for each.
    for level in range(offsets.shape[0] - 2, -1, -1):
        for b in range(count):
            line = offsets[level] + (index[b] << BITS)
            upto, below, chosen = 0.0, 0.0, 0
            for child in range(WIDTH):
                upto += nodes[line + child]
                passed = upto <= target[b]  # never first true beyond a child of 0
                chosen += passed
                below = upto if passed else below
            if chosen == WIDTH:  # the edge of rounding: the last child that is not 0
                chosen -= 1
                while chosen > 0 and nodes[line + chosen] == 0.0:
                    chosen -= 1
            index[b] = (index[b] << BITS) + chosen
            target[b] -= below
            if level > 0:
                prefetch(nodes, offsets[level - 1] + (index[b] << BITS))
    for b in range(count):
        weight[b] = (nodes[index[b]] / smallest) ** -beta


@compiled
def set_priorities(nodes, minima, offsets, slots, index, error, alpha, peak):  # type: ignore[no-untyped-def]
    """Set p = (|δ| + ε)^α for the leaves that are still alive.

    Returns -1 and the largest |δ| + ε seen; or the first place whose error is not finite or whose
    id is unknown, and then nothing is changed.
    """
    for b in range(index.shape[0]):
        if not np.isfinite(error[b]) or index[b] < 0 or index[b] >= slots:
            return b, peak
    for b in range(index.shape[0]):
        raw = abs(np.float64(error[b])) + EPSILON
        peak = max(peak, raw)
        if nodes[index[b]] > 0.0:
            nodes[index[b]] = raw**alpha
    refresh(nodes, minima, offsets, index)
    return -1, peak


def priorities_in(state: Any, slots: int, alpha: float) -> tuple[float, Tensor]:
    """Return the largest error seen, and the priorities, if these are what such errors gave."""
    saved = Saved(state, "priorities")
    peak, leaves = saved.real("peak", 1.0, LARGEST_ERROR), saved.raw("leaves")
    count = length(leaves)
    if count > slots:
        raise ValueError(f"priorities.leaves: are {count:,}, there is room for {slots:,}")
    most = peak**alpha * (1 + 1e-9)  # of two machines one may round otherwise
    return peak, saved.tensor("leaves", (count,), torch.float64, 0.0, most)


def check_leaves(leaves: Tensor, live: NDArray[np.int64]) -> None:
    """Refuse priorities of what cannot be drawn, and none of what can."""
    found = np.flatnonzero(leaves.cpu().numpy() > 0)
    if not np.array_equal(found, np.sort(live)):
        raise ValueError(
            f"priorities.leaves: {len(found):,} are above 0, not those of the {len(live):,} "
            "transitions that can be drawn"
        )


class SumTree:
    """Ids to draw in proportion to their priorities; compiled code draws, and sets the leaves."""

    def __init__(self, slots: int, alpha: float) -> None:
        offsets = level_offsets(slots)
        self.alpha, self.slots = alpha, slots
        self.peak = 1.0  # the largest raw priority seen: what new transitions start with
        self._nodes: NDArray[np.float64] = touched_zeros((offsets[-1],), np.float64)
        self._minima: NDArray[np.float64] = touched_zeros((offsets[-1] - offsets[1],), np.float64)
        self._minima.fill(np.inf)
        self.levels: Levels = (self._nodes, self._minima, np.array(offsets, np.int64))

    @staticmethod
    def bytes_needed(slots: int) -> int:
        """Return the bytes of a tree over `slots` leaves."""
        offsets = level_offsets(slots)
        return 8 * (2 * offsets[-1] - offsets[1] + len(offsets))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.levels)

    @property
    def leaves(self) -> NDArray[np.float64]:
        """Priorities p^α of all ids; 0 where nothing may be drawn."""
        return self._nodes[: self.slots]

    @property
    def newcomers(self) -> float:
        """Priority p^α of new transitions: that of the largest error seen."""
        newest: float = self.peak**self.alpha
        return newest

    def update(self, index: NDArray[np.int64], error: NDArray) -> None:
        """Set the priorities of drawn ids from their new errors, [B] each."""
        check_shapes(index, error)
        wrong, self.peak = set_priorities(
            *self.levels, self.slots, index, error, self.alpha, self.peak
        )
        if wrong >= 0:
            raise refuse(wrong, index[wrong], error[wrong], self.slots)

    @property
    def rarest(self) -> float:
        """Probability of the id that is least likely to be drawn."""
        total, smallest = root_of(*self.levels)
        return float(smallest / total)

    def clear(self) -> None:
        """Forget all priorities."""
        self._nodes.fill(0.0)
        self._minima.fill(np.inf)
        self.peak = 1.0

    def state_dict(self, count: int) -> dict[str, Any]:
        """Return the first `count` priorities (sharing memory) and the largest error seen."""
        return {"leaves": torch.from_numpy(self.leaves[:count]), "peak": self.peak}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; parents are recomputed, bit for bit."""
        self.clear()
        peak, kept = priorities_in(state, self.slots, self.alpha)
        leaves = kept.cpu().numpy()
        self.leaves[: len(leaves)] = leaves
        self.peak = peak
        refresh(*self.levels, np.arange(0, len(leaves), WIDTH))
