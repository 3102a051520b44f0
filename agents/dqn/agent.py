"""DQN (Mnih et al. 2015) with double, dueling, prioritised and n-step options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.dqn.build import build_parts
from steadyrl.agents.dqn.policy import build_network, build_policy, build_sampling_policy
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.replay_agent import ReplayAgent
from steadyrl.envs.types import BlockResult, EnvSpec, StepMany


class DQN(ReplayAgent):
    """Act ε-greedily or with noisy weights, store every step, learn from replay samples.

    `ReplayAgent` stores and updates; what it learns towards is the loss (`loss.py`).
    """

    build_network = staticmethod(build_network)  # a subclass may have a network of its own

    _settings: DQNSettings

    def __init__(
        self,
        settings: DQNSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
        extensions: Sequence[Extension] = (),
    ) -> None:
        common: Any = {"device": device, "seed": seed, "total_steps": total_steps}
        parts = build_parts(settings, spec, extensions, self.build_network, **common)
        super().__init__(parts, parts.extensions)
        self._epsilon, self._fused_rollout = parts.epsilon, parts.fused_rollout

    @classmethod
    def policy(
        cls, settings: DQNSettings, spec: EnvSpec, device: torch.device
    ) -> tuple[QNetwork, Actor]:
        """Build the network of a trained policy, and its greedy actor."""
        return build_policy(settings, spec, device, engine_of("direct"), cls.build_network)

    @override
    @classmethod
    def sampling_policy(
        cls, settings: DQNSettings, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
    ) -> tuple[QNetwork, Actor]:
        """Build the network with an actor that explores as at the end of training."""
        engine, drawn = engine_of("direct"), {"num_envs": num_envs, "seed": seed}
        return build_sampling_policy(settings, spec, device, engine, cls.build_network, **drawn)

    @override
    def collect_block(
        self, decision: Decision, step_many: StepMany | None, steps: int
    ) -> BlockResult | None:
        fused = self._fused_rollout if self._started and self._allows_blocks() else None
        return None if fused is None or step_many is None else fused(step_many, steps)

    def scalars(self) -> dict[str, float]:
        """Return ε and what every agent with a replay logs."""
        own = {}
        if self._settings.is_epsilon_greedy:
            own["train/epsilon"] = self._epsilon.at(self._clock.steps)
        return {**own, **super().scalars()}

    @override
    def attach_comm(self, comm: Comm) -> None:
        super().attach_comm(comm)
        self._fused_rollout = None
