"""Running statistics of observations and returns, over valid steps only.

A sample must be normalised the same way when it is acted on and when it is learned from. So the
statistics used are frozen while a rollout is collected and learned from, and updated between
rollouts. Only in the first rollout, with nothing to freeze, observations are normalised by
statistics that change at every timestep (`preview`, `update`). They are stored normalised, and
learned from unchanged (`set_identity_`, then `freeze_`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.statistics import Statistics, count_sum_sumsq
from steadyrl.agents.networks.action_mask import Masks

CLIP = 10.0  # normalised observations and rewards stay within ±10 standard deviations

EPSILON = 1e-8
MOST_COUNTED = 2.0**53  # whole numbers are exact in float64 up to here


class ObservationNormaliser(Statistics):
    """The first layer of a network: (x − mean) / std, clipped; the identity before any data.

    Action masks behind the features are left as they are.
    """

    count: Tensor
    mean: Tensor
    square: Tensor
    frozen_mean: Tensor
    inv_std: Tensor

    def __init__(
        self, shape: tuple[int, ...], masks: Masks | None = None, *, clip: float = CLIP
    ) -> None:
        super().__init__()
        self._masks, self._clip = masks, clip
        self.comm: Comm = SINGLE_PROCESS  # statistics are of all ranks
        self.register_buffer("count", torch.empty((), dtype=torch.float64))
        self.register_buffer("mean", torch.empty(shape, dtype=torch.float64))
        self.register_buffer("square", torch.empty(shape, dtype=torch.float64))
        self.register_buffer("frozen_mean", torch.empty(shape))
        self.register_buffer("inv_std", torch.empty(shape))
        self.reset_parameters()

    @override
    def check_ranges(self) -> None:
        for name in ("count", "square"):
            if (getattr(self, name) < 0).any():
                raise ValueError(f"normaliser.{name}: holds a number below 0")
        if not (self.inv_std > 0).all():
            raise ValueError("normaliser.inv_std: holds a number that is not above 0")

    def check_current(self, *, frozen: bool) -> None:
        """Raise ValueError if the count is impossible or, when `frozen`, the statistics disagree.

        A run's steps are no bound: after `init_from` the count goes on from that policy's.
        """
        if not self.count <= MOST_COUNTED or self.count % 1:
            raise ValueError(f"normaliser.count: is {self.count:g}, which counts no observations")
        frozen_mean, scale = self.frozen_mean.clone(), self.inv_std.clone()
        try:
            self.freeze_()
            same = torch.allclose(frozen_mean, self.frozen_mean) and torch.allclose(
                scale, self.inv_std
            )
        finally:
            self.frozen_mean.copy_(frozen_mean)
            self.inv_std.copy_(scale)
        if frozen and not same:
            raise ValueError("normaliser.frozen_mean, inv_std: do not agree with mean and square")

    def reset_parameters(self) -> None:
        """Discard all statistics."""
        for buffer in self._statistics():
            buffer.zero_()
        self.set_identity_()

    def forward(self, obs: Tensor) -> Tensor:
        """Return normalised observations [B, …]."""
        seen = obs if self._masks is None else self._masks.features(obs)
        normal = ((seen - self.frozen_mean) * self.inv_std).clamp(-self._clip, self._clip)
        return normal if self._masks is None else self._masks.replace_features(normal, obs)

    @torch.no_grad()
    def preview(self, obs: Tensor) -> None:
        """Normalise by the statistics with these observations [B, …], without counting them."""
        self._freeze(*self._merged_with(obs))

    @torch.no_grad()
    def update(self, obs: Tensor) -> None:
        """Count observations [B, …] and normalise by the result."""
        self.update_chunked(lambda: (obs,))

    @torch.no_grad()
    def update_chunked(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        """Count observations given in chunks [B, …]; `chunks()` may be iterated several times.

        Collective: each rank may have any number of chunks.
        """
        if self.comm.is_single:
            for obs in chunks():
                if len(obs):
                    self._set_statistics(self._merged_with(obs))
        else:
            self._set_statistics(self._merged(*self._statistics_of_all_ranks(chunks)))
        self.freeze_()

    def set_identity_(self) -> None:
        """Make the layer the identity, for observations that are normalised already."""
        self.frozen_mean.zero_()
        self.inv_std.fill_(1)

    def copy_statistics_(self, other: ObservationNormaliser) -> None:
        """Copy another normaliser's statistics."""
        for mine, its in zip(self._statistics(), other._statistics(), strict=True):
            mine.copy_(its)
        self.freeze_()

    def freeze_(self) -> None:
        """Normalise by the statistics so far; the identity if there are none."""
        self._freeze(*self._statistics())

    def _statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.mean, self.square

    def _merged_with(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return count, mean and Σ(x − mean)² including these observations.

        Chan et al. 1979, in float64. Collective: including those of all ranks.
        """
        if not self.comm.is_single:
            return self._merged(*self._statistics_of_all_ranks(lambda: (obs,)))
        x = self._numbers(obs)
        mean = x.mean(0)
        return self._merged(len(x), mean, (x - mean).square().sum(0))

    def _numbers(self, obs: Tensor) -> Tensor:
        return (obs if self._masks is None else self._masks.features(obs)).double()

    def _set_statistics(self, statistics: tuple[Tensor, Tensor, Tensor]) -> None:
        for mine, new in zip(self._statistics(), statistics, strict=True):
            mine.copy_(new)

    def _merged(self, count: int, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the statistics merged with `count` observations of this mean and Σ(x − mean)²."""
        if not count:
            return self._statistics()
        delta = mean - self.mean
        total = self.count + count
        weight = count / total
        square = squares + delta.square() * (self.count * weight)
        return total, self.mean + delta * weight, self.square + square

    def _statistics_of_all_ranks(
        self, chunks: Callable[[], Iterable[Tensor]]
    ) -> tuple[int, Tensor, Tensor]:
        """Return count, mean and Σ(x − mean)² of all ranks' chunks."""
        sums, squares = self.mean.new_zeros(1 + self.mean.numel()), torch.zeros_like(self.mean)
        for x in map(self._numbers, chunks()):
            sums[0] += len(x)
            sums[1:] += x.sum(0).flatten()
        count, total = self.comm.all_reduce_(sums).split((1, self.mean.numel()))
        samples = int(count.item())
        mean = total.view_as(self.mean) / max(samples, 1)
        for x in map(self._numbers, chunks()):
            squares += (x - mean).square().sum(0)
        return samples, mean, self.comm.all_reduce_(squares)

    def _freeze(self, count: Tensor, mean: Tensor, square: Tensor) -> None:
        std = (square / count.clamp(min=1)).sqrt()
        self.frozen_mean.copy_(mean)
        # A constant input carries no information, but must not be amplified once it varies.
        self.inv_std.copy_(torch.where(std > EPSILON, 1 / std, torch.ones_like(std)))


POPART_DECAY = 0.9  # per rollout, of earlier returns in the running statistics

SMALLEST = 1e-4  # smallest standard deviation: constants must not be amplified


class PopArt(Statistics):
    """Running mean and standard deviation of returns, corrected for initialisation bias."""

    moments: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Exponential moving averages over rollouts of 1, R and R².
        self.register_buffer("moments", torch.empty(3, dtype=torch.float64))

    @override
    def check_ranges(self) -> None:
        mass, _, second = self.moments.tolist()
        if not (0 <= mass <= 1 and second >= 0):
            raise ValueError(f"popart.moments: are {self.moments.tolist()}, which no returns have")

    def reset_parameters(self) -> None:
        """Discard all statistics."""
        self.moments.zero_()

    @property
    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        """μ and σ [] of V = μ + σV̂; 0 and 1 before any return."""
        mass, first, second = self.moments.unbind()
        known = mass > 0
        mass = torch.where(known, mass, 1.0)
        mean = first / mass
        std = (second / mass - mean.square()).clamp(min=SMALLEST**2).sqrt()
        return mean, torch.where(known, std, 1.0)

    def update(self, returns: Tensor, comm: Comm) -> None:
        """Collective: update the statistics with the returns [M] of a rollout."""
        count, first, second = comm.all_reduce_(count_sum_sumsq(returns)).unbind()
        if count > 0:
            new = torch.stack((torch.ones_like(first), first / count, second / count))
            self.moments.lerp_(new, 1 - POPART_DECAY)
