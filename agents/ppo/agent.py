"""PPO (Schulman et al. 2017): collect a rollout, learn from it for some epochs, discard it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.agents.base import Actor, DecidedStep, Decision
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.ppo.build import build_minibatches, build_parts
from steadyrl.agents.ppo.policy import build_network, build_policy, build_sampling_policy
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.agents.rollout_agent import RolloutAgent
from steadyrl.envs.types import EnvSpec, Step


class PPO(RolloutAgent):
    """Learn from each rollout by the clipped objective.

    `RolloutAgent.update` says when: once the rollout is full, its advantages are computed
    (`advantages.py`), and `epochs` passes over its minibatches follow, which a KL above the target
    ends.
    """

    build_network = staticmethod(build_network)  # a subclass may have a network of its own

    state_names = (*RolloutAgent.state_names, "_rewards")
    per_rank_state = (*RolloutAgent.per_rank_state, "rewards")

    def __init__(
        self,
        settings: PPOSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
        extensions: Sequence[Extension] = (),
    ) -> None:
        common: Any = {"device": device, "seed": seed, "total_steps": total_steps}
        parts = build_parts(settings, spec, extensions, self.build_network, **common)
        self._settings, self._schedules = settings, parts.schedules
        self._rewards, self._observations = parts.targets.rewards, parts.targets.observations
        super().__init__(parts, extensions)

    @classmethod
    def policy(
        cls, settings: PPOSettings, spec: EnvSpec, device: torch.device
    ) -> tuple[ActorCritic, Actor]:
        """Build the network of a trained policy, and the actor that takes its mode."""
        return build_policy(settings, spec, device, engine_of("direct"), cls.build_network)

    @override
    @classmethod
    def sampling_policy(
        cls, settings: PPOSettings, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
    ) -> tuple[ActorCritic, Actor]:
        """Build the network with an actor that samples from its distribution."""
        engine, drawn = engine_of("direct"), {"num_envs": num_envs, "seed": seed}
        return build_sampling_policy(settings, spec, device, engine, cls.build_network, **drawn)

    @override
    def _to_store(self, decision: Decision, step: Step) -> tuple[Decision, Step]:
        obs = self._observations.to_store(decision.obs, step.valid)
        reward = self._rewards.to_store(step.reward, step.valid)
        return decision._replace(obs=obs), step._replace(reward=reward)

    @override
    def _allows_blocks(self) -> bool:
        # Normalising before storing changes statistics at every timestep.
        return super()._allows_blocks() and not self._observations.stores_normalised

    @property
    def clip(self) -> float:
        """Clip range of the probability ratio in the update that ends the current rollout."""
        return self._clock.at_rollout_start(self._schedules.clip)

    @property
    def entropy_coef(self) -> float:
        """Entropy coefficient in the update that ends the current rollout."""
        return self._clock.at_rollout_start(self._schedules.entropy_coef)

    def scalars(self) -> dict[str, float]:
        """Return the schedules' values."""
        own = {"train/clip": self.clip, "train/entropy_coef": self.entropy_coef}
        return {**own, **super().scalars()}

    @override
    def attach_comm(self, comm: Comm) -> None:
        super().attach_comm(comm)
        samples = self._rollout.reward.numel()
        self._minibatches = build_minibatches(self._settings, samples, self._learner, comm)

    @override
    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        for state in departed_states:
            self._rewards.merge_state(state["rewards"])
        super().reshard(departed_states)
        self._observations.freeze()

    @override
    def check_consistency(self, steps: int, pending: DecidedStep | None, obs: NDArray[Any]) -> None:
        super().check_consistency(steps, pending, obs)
        self._observations.check_consistency(frozen=pending is None)
