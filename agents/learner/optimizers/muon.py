"""Muon for the matrices of hidden layers, AdamW for all other weights, of one flat tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steadyrl.agents.learner.optimizers.adam import LARGEST_SQUARE, AdamState, adam_traceable_

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of X, (X Xᵀ) X and (X Xᵀ)² X
ITERATIONS = 5
SMALLEST_NORM = 1e-7
# So that a step is as large as Adam's with the same learning rate (Liu et al. 2025, section 2.2).
LIKE_ADAM = 0.2


class MuonState(NamedTuple):
    """Momentum of the M matrix elements, and AdamW's moments of the R other weights."""

    momentum: Tensor  # [M]
    exp_avg: Tensor  # [R]
    exp_avg_sq: Tensor  # [R]
    step: Tensor  # []

    @property
    def of_others(self) -> AdamState:
        """AdamW's part."""
        return AdamState(self.exp_avg, self.exp_avg_sq, self.step)


class Layout:
    """Which parts of a flat tensor are hidden matrices, and their shapes."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], hidden: Mapping[str, int]) -> None:
        """Take the shapes of all parameters in order, and the hidden ones.

        `hidden` has the number of matrices that lie side by side in each, as the gates of a cell.
        """
        self._sizes = [math.prod(shape) for shape in shapes.values()]
        self.is_hidden = [name in hidden for name in shapes]
        self.shapes = [
            matrix_shape(shapes[name], hidden[name]) for name in shapes if name in hidden
        ]

    def split(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the hidden matrices and the other weights of a flat tensor [P]; all are views."""
        pieces = list(zip(flat.split(self._sizes), self.is_hidden, strict=True))
        return [part for part, hidden in pieces if hidden], [
            p for p, hidden in pieces if not hidden
        ]

    def merge(self, matrices: Iterable[Tensor], others: Tensor) -> Tensor:
        """Return the flat tensor [P] of the matrices and of the other weights [R]."""
        sizes = [s for s, hidden in zip(self._sizes, self.is_hidden, strict=True) if not hidden]
        parts, rest = iter(matrices), iter(others.split(sizes))
        return torch.cat([next(parts if hidden else rest) for hidden in self.is_hidden])

    def numel(self) -> int:
        """Return the number of elements of hidden matrices."""
        return sum(size for size, hidden in zip(self._sizes, self.is_hidden, strict=True) if hidden)


def matrix_shape(shape: Sequence[int], gates: int) -> tuple[int, int, int, int]:
    """Return a parameter's shape as G × rows × gates × columns.

    Filters [O, C, h, w] are a matrix with one row per filter; a parameter [G, in, out] is a stack.
    """
    if len(shape) == 4:
        return 1, shape[0], 1, math.prod(shape[1:])
    *stack, rows, columns = shape
    return math.prod(stack), rows, gates, columns // gates


def muon_(
    weights: Tensor,
    gradient: Tensor,
    state: MuonState,
    learning_rate: Tensor,
    *,
    layout: Layout,
    epsilon: float,
    weight_decay: float,
) -> None:
    """Take one step in place (Jordan et al. 2024), with decoupled weight decay.

    Matrices step along their orthogonalised Nesterov momentum, other weights by AdamW.
    """
    matrices, others = layout.split(weights)
    gradients, other_gradients = layout.split(gradient)
    joined = torch.cat(gradients)
    state.momentum.lerp_(joined, 1 - MOMENTUM)
    update = joined.lerp(state.momentum, MOMENTUM).split([len(part) for part in matrices])
    decayed = 1 - learning_rate * weight_decay
    directions = orthogonal_all(update, layout.shapes)
    new = []
    for matrix, direction, shape in zip(matrices, directions, layout.shapes, strict=True):
        size = learning_rate * (LIKE_ADAM * math.sqrt(max(shape[1], shape[3])))
        new.append(matrix * decayed - size * direction)
    rest = torch.cat(others)
    adam_traceable_(
        rest,
        torch.cat(other_gradients),
        state.of_others,
        learning_rate,
        epsilon=epsilon,
        weight_decay=weight_decay,
        decoupled=True,
    )
    weights.copy_(layout.merge(new, rest))


def orthogonal_all(
    flat: Sequence[Tensor], shapes: Sequence[tuple[int, int, int, int]]
) -> list[Tensor]:
    """Return flat matrices of these shapes orthogonalised; those of one size in one batch."""
    stacks = []
    for part, (stack, rows, gates, columns) in zip(flat, shapes, strict=True):
        x = part.view(stack, rows, gates, columns).transpose(1, 2).reshape(-1, rows, columns)
        stacks.append(x.transpose(1, 2) if rows > columns else x)
    found: list[Tensor] = list(stacks)
    for size in dict.fromkeys(x.shape[1:] for x in stacks):
        same = [i for i, x in enumerate(stacks) if x.shape[1:] == size]
        done = orthogonalize(torch.cat([stacks[i] for i in same]))
        for i, x in zip(same, done.split([len(stacks[i]) for i in same]), strict=True):
            found[i] = x
    flat_again = []
    for x, (stack, rows, gates, columns) in zip(found, shapes, strict=True):
        x = x.transpose(1, 2) if rows > columns else x
        flat_again.append(x.reshape(stack, gates, rows, columns).transpose(1, 2).reshape(-1))
    return flat_again


def orthogonalize(x: Tensor) -> Tensor:
    """Return U S' Vᵀ for matrices X = U S Vᵀ [B, n, m], n ≤ m, with S' between 0.5 and 1.5.

    Five iterations X ← aX + (bA + cA²) X, A = XXᵀ, of Newton and Schulz, in the weights' precision.
    """
    a, b, c = COEFFICIENTS
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    return x


def check_momentum(state: MuonState) -> None:
    """Raise ValueError for a momentum that no gradients lead to."""
    if (state.momentum.square() > LARGEST_SQUARE).any():
        most = math.sqrt(LARGEST_SQUARE)
        raise ValueError(f"optimizer_state.momentum: holds a number beyond ±{most:g}")
