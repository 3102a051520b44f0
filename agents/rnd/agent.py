"""PPO that is rewarded for what is new as well, with or without a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from steadyrl.agents.distillation.agents import TaughtPPO
from steadyrl.agents.learner.comm import World
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.ppo.agent import PPO
from steadyrl.agents.ppo.build import mode_of
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.agents.rnd.rnd import Curiosity
from steadyrl.core.metrics import Metrics
from steadyrl.envs.types import EnvSpec


class CuriousPPO(PPO):
    """PPO whose advantages have those of novelty added, before it learns from them."""

    state_names: ClassVar[tuple[str, ...]] = (*PPO.state_names, "_curiosity", "_novelties")

    of_one_rank = (*PPO.of_one_rank, "novelties")  # type: ignore[assignment]

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
        mode = mode_of(settings, spec, device, total_steps)
        [own] = np.random.SeedSequence([seed, 2]).generate_state(1).tolist()  # of nobody else
        self._curiosity = Curiosity(settings, spec, device, mode, own)
        self._novelties = self._curiosity.rewards

    @override
    def join(self, world: World) -> None:
        super().join(world)
        self._curiosity.join(world)

    @override
    def obey(self, stop: Stop) -> None:
        super().obey(stop)
        self._curiosity.learner.stop = stop

    @override
    def regroup(self, lost: Sequence[Mapping[str, Any]]) -> None:
        for state in lost:
            self._novelties.take_over(state["novelties"])
        super().regroup(lost)

    @override
    def _all_or_nothing(self) -> Metrics | None:
        with self._curiosity.all_or_nothing():
            return super()._all_or_nothing()

    @property
    def rnd_coef(self) -> float:
        """What novelty counts for in the update at the end of the rollout under way."""
        return self._now(self._settings.rnd.coefs)

    @override
    def _finish_rollout(self) -> None:
        super()._finish_rollout()
        if self.rnd_coef:
            self._curiosity.reward(self._rollout, torch.from_numpy(self._next_obs), self.rnd_coef)

    @override
    def _learn(self) -> Metrics | None:
        metrics = super()._learn()
        if not self.rnd_coef:
            return metrics
        found = self._curiosity.learn(self._rollout, self._shuffling, self.learning_rate)
        # The rows of the first rollout are stored as the policy's normaliser saw them.
        known = self._observations if self._begun == 0 else None
        self._curiosity.take_in(self._rollout, known)
        return joined(metrics, found)

    @override
    def scalars(self) -> dict[str, float]:
        return super().scalars() | {"train/rnd_coef": self.rnd_coef}

    @override
    def nbytes(self) -> dict[str, int]:
        return {**super().nbytes(), "curiosity": self._curiosity.nbytes}

    @override
    def release(self) -> None:
        del self._curiosity, self._novelties
        super().release()


class CuriousTaughtPPO(CuriousPPO, TaughtPPO):
    """The same with a teacher."""

    state_names: ClassVar[tuple[str, ...]] = (*CuriousPPO.state_names, "_teaching")


def joined(metrics: Metrics | None, others: Metrics | None) -> Metrics | None:
    """Return both, without the others' loss as a whole, their first, and gradient, their last."""
    if metrics is None or others is None:
        return metrics
    names = (*metrics.names, *others.names[1:-1])
    return Metrics(names, torch.cat((metrics.values, others.values[1:-1])))
