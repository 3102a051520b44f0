"""Priorities in host memory: an 8-ary sum tree with a minimum tree on top.

Eight float64 children fill one 64-byte cache line, so a draw among a million leaves touches seven
lines, of which two or three miss the cache. A parent is always recomputed as the sum of its
children, never adjusted, so rounding errors do not accumulate. A leaf of 0 cannot be drawn. Level 0
holds the leaves; every level is padded with zeros to whole cache lines.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.buffers.memory_layout import prefaulted_zeros
from steadyrl.buffers.replay.prefetch import prefetch
from steadyrl.core.errors import NonFiniteError
from steadyrl.core.jit import jit
from steadyrl.core.saved_state import Saved, length

EPSILON = 1e-6  # keeps a transition without error drawable; ε in Schaul et al. 2016, §3.3

LARGEST_ERROR = 4e38  # above the float32 range, in which TD errors are computed
WIDTH = 8  # children of a node
BITS = 3  # log2(WIDTH)

# The arrays of a tree for compiled code: sums, minima, and the offset of each level.
Levels = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
NO_LEVELS: Levels = (np.zeros(0), np.zeros(0), np.zeros(0, np.int64))


def check_shapes(index: Tensor | NDArray, td_error: Tensor | NDArray) -> None:
    """Raise ValueError unless both are [B]: [B] and [B, 1] would broadcast to [B, B]."""
    if index.shape != td_error.shape or index.ndim != 1:
        raise ValueError(
            f"update_priorities: index {tuple(index.shape)} and td_error {tuple(td_error.shape)}"
            " must both be [B]"
        )


def invalid_update(place: int, index: int, error: float, slots: int) -> Exception:
    """Return the exception for an invalid (id, TD error) pair."""
    if math.isfinite(error):
        return IndexError(f"update_priorities: index[{place}]={index} is not in [0, {slots})")
    return NonFiniteError(
        f"td_error[{place}]={error} for transition {index}: a priority must be a finite number;"
        " lower the learning rate or look for infinite rewards"
    )


def level_offsets(slots: int) -> list[int]:
    """Return the offset of each level in the flat array, and the total size."""
    offsets, size = [0], slots
    while True:
        lines = -(-size // WIDTH)
        offsets.append(offsets[-1] + lines * WIDTH)
        if lines == 1:
            return offsets
        size = lines


@jit
def refresh(nodes, minima, offsets, index):  # type: ignore[no-untyped-def]
    """Recompute all ancestors of the leaves `index` [B]: sums, and minima of nonzero leaves.

    Consecutive ids often share a parent: one equal to the previous one's is skipped.
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


@jit
def root_sums(nodes, minima, offsets):  # type: ignore[no-untyped-def]
    """Return the sum of all leaves and the smallest nonzero leaf (infinity if there is none)."""
    levels = offsets.shape[0] - 1
    total, smallest = 0.0, np.inf
    for node in range(offsets[levels - 1], offsets[levels]):
        total += nodes[node]
        if levels > 1:
            smallest = min(smallest, minima[node - offsets[1]])
        elif nodes[node] > 0.0:
            smallest = min(smallest, nodes[node])
    return total, smallest


@jit
def set_leaves(nodes, minima, offsets, initial_priority, added, evicted):  # type: ignore[no-untyped-def]
    """Set added leaves to `initial_priority`, then evicted leaves to 0."""
    nodes[added] = initial_priority
    nodes[evicted] = 0.0
    refresh(nodes, minima, offsets, added)
    refresh(nodes, minima, offsets, evicted)


@jit
def draw_stratified(nodes, minima, offsets, uniform, beta, target, index, weight):  # type: ignore[no-untyped-def]
    """Stratified sampling: draw one leaf from each of B equal parts of the priority mass.

    Writes index [B] and weight [B]; target [B] is scratch (the mass left to descend).
    weight_i = (N·P(i))^-β / max_j (N·P(j))^-β = (leaf_i / smallest leaf)^-β for a replay of N.
    """
    total, smallest = root_sums(nodes, minima, offsets)
    count = index.shape[0]
    for b in range(count):
        index[b] = 0
        target[b] = (b + uniform[b]) / count * total
    # All draws descend one level together, without data-dependent branches, and prefetch their next
    # cache line, which has arrived by the time they descend further.
    for level in range(offsets.shape[0] - 2, -1, -1):
        for b in range(count):
            line = offsets[level] + (index[b] << BITS)
            upto, below, chosen = 0.0, 0.0, 0
            for child in range(WIDTH):
                upto += nodes[line + child]
                passed = upto <= target[b]  # a child of 0 is never where this turns false
                chosen += passed
                below = upto if passed else below
            if chosen == WIDTH:  # by rounding, above the sum: take the last nonzero child
                chosen -= 1
                while chosen > 0 and nodes[line + chosen] == 0.0:
                    chosen -= 1
            index[b] = (index[b] << BITS) + chosen
            target[b] -= below
            if level > 0:
                prefetch(nodes, offsets[level - 1] + (index[b] << BITS))
    for b in range(count):
        weight[b] = (nodes[index[b]] / smallest) ** -beta


@jit
def set_priorities(nodes, minima, offsets, slots, index, error, alpha, max_priority):  # type: ignore[no-untyped-def]
    """Set leaves that have not been evicted to p^α, p = |δ| + ε.

    Returns -1 and the largest |δ| + ε seen; or, without changing anything, the first position in
    the batch whose error is not finite or whose id is out of range.
    """
    for b in range(index.shape[0]):
        if not np.isfinite(error[b]) or index[b] < 0 or index[b] >= slots:
            return b, max_priority
    for b in range(index.shape[0]):
        raw = abs(np.float64(error[b])) + EPSILON
        max_priority = max(max_priority, raw)
        if nodes[index[b]] > 0.0:
            nodes[index[b]] = raw**alpha
    refresh(nodes, minima, offsets, index)
    return -1, max_priority


def load_priorities(state: Any, slots: int, alpha: float) -> tuple[float, Tensor]:
    """Return the largest |δ| + ε and the priorities of a saved state, after checking both."""
    saved = Saved(state, "priorities")
    max_priority, leaves = saved.real("max_priority", 1.0, LARGEST_ERROR), saved.raw("leaves")
    count = length(leaves)
    if count > slots:
        raise ValueError(f"priorities.leaves: {count:,} are saved, {slots:,} fit")
    most = max_priority**alpha * (1 + 1e-9)  # another machine may round differently
    return max_priority, saved.tensor("leaves", (count,), torch.float64, 0.0, most)


def check_leaves(leaves: Tensor, sampleable_ids: NDArray[np.int64]) -> None:
    """Raise ValueError unless exactly the sampleable ids have a priority."""
    found = np.flatnonzero(leaves.cpu().numpy() > 0)
    if not np.array_equal(found, np.sort(sampleable_ids)):
        raise ValueError(
            f"priorities.leaves: {len(found):,} are above 0, not exactly those of the "
            f"{len(sampleable_ids):,} sampleable transitions"
        )


class SumTree:
    """Sum tree over transition ids; `draw_stratified` and `set_leaves` work on its `levels`."""

    def __init__(self, slots: int, alpha: float) -> None:
        offsets = level_offsets(slots)
        self.alpha, self.slots = alpha, slots
        self.max_priority = 1.0  # largest |δ| + ε seen: the priority of new transitions
        self._nodes: NDArray[np.float64] = prefaulted_zeros((offsets[-1],), np.float64)
        self._minima: NDArray[np.float64] = prefaulted_zeros(
            (offsets[-1] - offsets[1],), np.float64
        )
        self._minima.fill(np.inf)
        self.levels: Levels = (self._nodes, self._minima, np.array(offsets, np.int64))

    @staticmethod
    def bytes_needed(slots: int) -> int:
        """Return the bytes of a tree over `slots` leaves."""
        offsets = level_offsets(slots)
        return 8 * (2 * offsets[-1] - offsets[1] + len(offsets))

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(part.nbytes for part in self.levels)

    @property
    def leaves(self) -> NDArray[np.float64]:
        """Priorities p^α of all ids; 0: not sampleable."""
        return self._nodes[: self.slots]

    @property
    def initial_priority(self) -> float:
        """Priority p^α of new transitions: that of the largest TD error seen."""
        initial: float = self.max_priority**self.alpha
        return initial

    def update(self, index: NDArray[np.int64], error: NDArray) -> None:
        """Set the priorities of ids [B] from their new TD errors [B]."""
        check_shapes(index, error)
        wrong, self.max_priority = set_priorities(
            *self.levels, self.slots, index, error, self.alpha, self.max_priority
        )
        if wrong >= 0:
            raise invalid_update(wrong, index[wrong], error[wrong], self.slots)

    @property
    def min_probability(self) -> float:
        """Smallest sampling probability of any id."""
        total, smallest = root_sums(*self.levels)
        return float(smallest / total)

    def clear(self) -> None:
        """Reset all priorities."""
        self._nodes.fill(0.0)
        self._minima.fill(np.inf)
        self.max_priority = 1.0

    def state_dict(self, count: int) -> dict[str, Any]:
        """Return the first `count` priorities (sharing memory) and the largest |δ| + ε seen."""
        return {"leaves": torch.from_numpy(self.leaves[:count]), "max_priority": self.max_priority}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; parents are recomputed and equal the saved ones bit for bit."""
        self.clear()
        max_priority, saved_leaves = load_priorities(state, self.slots, self.alpha)
        leaves = saved_leaves.cpu().numpy()
        self.leaves[: len(leaves)] = leaves
        self.max_priority = max_priority
        refresh(*self.levels, np.arange(0, len(leaves), WIDTH))
