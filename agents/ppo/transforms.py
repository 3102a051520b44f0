"""Transforms of PPO's rewards and observations: clipped, scaled, normalised."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.networks.normalizers import CLIP, ObservationNormaliser
from steadyrl.agents.ppo.advantages import ObservationTransform, RewardTransform
from steadyrl.agents.rollout_agent import RolloutClock
from steadyrl.buffers.memory_layout import to_device
from steadyrl.buffers.rollout.buffer import RolloutBuffer


class ClippedRewards(RewardTransform):
    """Rewards clipped to ±1."""

    @override
    def to_store(self, reward: NDArray[np.float32], valid: NDArray[np.bool_]) -> NDArray[Any]:
        return np.clip(reward, -1, 1)


class ScaledRewards(RewardTransform):
    """Rewards divided by the standard deviation of their discounted sums."""

    @override
    def to_store(self, reward: NDArray[np.float32], valid: NDArray[np.bool_]) -> NDArray[Any]:
        self.add(reward, valid)
        return reward

    @override
    def scale_(self, reward: Tensor) -> None:
        reward.mul_(self.scale).clamp_(-CLIP, CLIP)


class NormalisedObservations(ObservationTransform):
    """Running statistics, in the network's first layer; see `networks/normalizers.py`.

    The first rollout stores observations normalised, and later ones store them as they are.
    """

    def __init__(
        self, normaliser: ObservationNormaliser, clock: RolloutClock, chunk_size: int
    ) -> None:
        self.normaliser: ObservationNormaliser = normaliser
        self._clock, self._chunk_size = clock, chunk_size

    @property
    def stores_normalised(self) -> bool:  # type: ignore[override]
        """Whether the rollout holds normalised observations: the first one does."""
        return self._clock.in_first_rollout

    @override
    def to_store(self, obs: Tensor, valid: NDArray[np.bool_]) -> Tensor:
        if not self.stores_normalised:
            return obs
        seen = obs.to(self.normaliser.mean.device)
        normal: Tensor = self.normaliser(seen)
        indices = to_device(np.flatnonzero(valid), seen.device)
        self.normaliser.update(seen.index_select(0, indices))
        return normal

    @override
    def begin_update(self, next_obs: Tensor) -> Tensor:
        if not self.stores_normalised:
            return next_obs
        normal: Tensor = self.normaliser(next_obs)
        self.normaliser.set_identity_()
        return normal

    @override
    def after_update(self, rollout: RolloutBuffer) -> None:
        if self.stores_normalised:  # and counted
            self.normaliser.freeze_()
            return
        obs, chunks = rollout.obs.flatten(0, 1), rollout.valid_indices.split(self._chunk_size)
        self.normaliser.update_chunked(lambda: (obs.index_select(0, each) for each in chunks))

    @override
    def freeze(self) -> None:
        self.normaliser.freeze_()

    @override
    def attach_comm(self, comm: Comm) -> None:
        self.normaliser.comm = comm

    @override
    def check_consistency(self, *, frozen: bool) -> None:
        self.normaliser.check_current(frozen=frozen)
