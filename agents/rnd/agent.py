"""PPO with random network distillation, with or without a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from steadyrl.agents.distillation.agents import DistilledPPO
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.ppo.agent import PPO
from steadyrl.agents.ppo.build import update_mode
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.agents.rnd.rnd import RND
from steadyrl.core.metrics import Metrics
from steadyrl.envs.types import EnvSpec


class RNDPPO(PPO):
    """PPO that adds the advantages of intrinsic rewards before each update."""

    state_names: ClassVar[tuple[str, ...]] = (*PPO.state_names, "_rnd", "_intrinsic_rewards")

    per_rank_state = (*PPO.per_rank_state, "intrinsic_rewards")

    def __init__(
        self,
        settings: PPOSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
        **others: Any,
    ) -> None:
        super().__init__(
            settings, spec, device=device, seed=seed, total_steps=total_steps, **others
        )
        mode = update_mode(settings, spec, device, total_steps)
        [rnd_seed] = (
            np.random.SeedSequence([seed, 2]).generate_state(1).tolist()
        )  # a stream of its own
        self._rnd = RND(settings, spec, device, mode, rnd_seed)
        self._intrinsic_rewards = self._rnd.rewards

    @override
    def attach_comm(self, comm: Comm) -> None:
        super().attach_comm(comm)
        self._rnd.attach_comm(comm)

    @override
    def set_stop_flag(self, stop: Stop) -> None:
        super().set_stop_flag(stop)
        self._rnd.learner.stop = stop

    @override
    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        for state in departed_states:
            self._intrinsic_rewards.merge_state(state["intrinsic_rewards"])
        super().reshard(departed_states)

    @override
    def _update_in_transaction(self) -> Metrics | None:
        with self._rnd.transaction():
            return super()._update_in_transaction()

    @property
    def rnd_coef(self) -> float:
        """Coefficient of intrinsic advantages in the update that ends the current rollout."""
        return self._anneal(self._settings.rnd.coefs)

    @override
    def _compute_advantages(self) -> None:
        super()._compute_advantages()
        if self.rnd_coef:
            self._rnd.reward(self._rollout, torch.from_numpy(self._next_obs), self.rnd_coef)

    @override
    def _learn(self) -> Metrics | None:
        metrics = super()._learn()
        if not self.rnd_coef:
            return metrics
        rnd_metrics = self._rnd.learn(self._rollout, self._shuffling, self.learning_rate)
        # The first rollout stores normalised observations: copy the policy's statistics instead.
        known = self._obs_normaliser if self._steps_at_rollout_start == 0 else None
        self._rnd.update_statistics(self._rollout, known)
        return merge_metrics(metrics, rnd_metrics)

    @override
    def scalars(self) -> dict[str, float]:
        return super().scalars() | {"train/rnd_coef": self.rnd_coef}

    @override
    def nbytes(self) -> dict[str, int]:
        return {**super().nbytes(), "curiosity": self._rnd.nbytes}

    @override
    def release(self) -> None:
        del self._rnd, self._intrinsic_rewards
        super().release()


class DistilledRNDPPO(RNDPPO, DistilledPPO):
    """The same with a teacher."""

    state_names: ClassVar[tuple[str, ...]] = (*RNDPPO.state_names, "_teacher_guide")


def merge_metrics(metrics: Metrics | None, others: Metrics | None) -> Metrics | None:
    """Return both metrics; of RND's, without the total loss (first) and gradient norm (last)."""
    if metrics is None or others is None:
        return metrics
    names = (*metrics.names, *others.names[1:-1])
    return Metrics(names, torch.cat((metrics.values, others.values[1:-1])))
