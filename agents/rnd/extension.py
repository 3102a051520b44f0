"""Random network distillation as an extension of PPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.engine.choice import build_engine
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.learner.reward_normaliser import RewardNormaliser
from steadyrl.agents.ppo.build import PPOParts
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.agents.rnd.rnd import METRICS, RND
from steadyrl.core.metrics import Metrics
from steadyrl.envs.types import EnvSpec


class PPORND(Extension):
    """Add the advantages of intrinsic rewards before each update, and train RND after it."""

    state_names: ClassVar[tuple[str, ...]] = ("_rnd", "_intrinsic_rewards")
    per_rank_state = ("intrinsic_rewards",)

    _parts: PPOParts
    _rnd: RND
    _intrinsic_rewards: RewardNormaliser

    def __init__(
        self,
        settings: PPOSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
    ) -> None:
        self._settings, self._spec, self._device = settings, spec, device
        updates = settings.expected_updates(spec, total_steps)
        self._engine = build_engine(settings.compile, updates, spec, device)
        self._coefs = settings.rnd.coefs(total_steps)
        # A stream of its own.
        [self._seed] = np.random.SeedSequence([seed, 2]).generate_state(1).tolist()

    @override
    def attach(self, parts: PPOParts) -> None:
        self._parts = parts
        self._rnd = RND(self._settings, self._spec, self._device, self._engine, self._seed)
        self._intrinsic_rewards = self._rnd.rewards

    @property
    def rnd_coef(self) -> float:
        """Coefficient of intrinsic advantages in the update that ends the current rollout."""
        return self._parts.clock.at_rollout_start(self._coefs)

    @override
    def transaction(self) -> AbstractContextManager[None]:
        return self._rnd.transaction()

    @override
    def after_targets(self, next_obs: Tensor) -> None:
        if self.rnd_coef:
            self._rnd.add_advantages(self._parts.rollout, next_obs, self.rnd_coef)

    @override
    def after_epochs(self, metrics: Metrics | None, rate: float) -> Metrics | None:
        if not self.rnd_coef:
            return metrics
        parts = self._parts
        rnd_metrics = self._rnd.learn(parts.rollout, parts.shuffling, rate)
        observations = parts.targets.observations
        # Normalised observations cannot be counted: copy the policy's statistics instead.
        known = observations.normaliser if observations.stores_normalised else None
        self._rnd.update_statistics(parts.rollout, known)
        return merge_metrics(metrics, rnd_metrics)

    @override
    def attach_comm(self, comm: Comm) -> None:
        self._rnd.attach_comm(comm)

    @override
    def set_stop_flag(self, stop: Stop) -> None:
        self._rnd.learner.stop = stop

    @override
    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        for state in departed_states:
            self._intrinsic_rewards.merge_state(state["intrinsic_rewards"])

    @override
    def scalars(self) -> dict[str, float]:
        return {"train/rnd_coef": self.rnd_coef}

    @override
    def nbytes(self) -> dict[str, int]:
        return {"curiosity": self._rnd.nbytes}


def merge_metrics(metrics: Metrics | None, others: Metrics | None) -> Metrics | None:
    """Return both metrics; of RND's, its two losses, without their sum and gradient norm."""
    if metrics is None or others is None:
        return metrics
    own = [i for i, name in enumerate(others.names) if name in METRICS]
    names = (*metrics.names, *(others.names[i] for i in own))
    values = torch.cat((metrics.values, *(others.values[i : i + 1] for i in own)))
    return Metrics(names, values, (*metrics.counts, *(others.counts[i] for i in own)))
