"""Types and checks of the `agent.*` keys of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agents.settings import LearnerSettings
from envs.types import EnvSpec
from memory.errors import SettingError, at_least, at_most, fraction, positive

LARGEST_LOG_STD = 20  # e^20 is half a billion


@dataclass(frozen=True, kw_only=True)
class PPOSettings(LearnerSettings):
    """Proximal policy optimisation; `rollout_steps` are rows, each with all environments."""

    name: Literal["ppo"]
    activation: Literal["tanh", "relu"]
    shared_trunk: bool | None
    log_std_init: float
    scale_actions: bool
    gae_lambda: float
    rollout_steps: int
    epochs: int
    minibatches: int
    batch_size: int | None
    clip: float
    anneal_clip: bool
    clip_value: bool
    entropy_coef: float
    value_coef: float
    target_kl: float | None
    normalize_obs: bool
    normalize_reward: bool
    clip_reward: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "rollout_steps", "epochs", "minibatches", "clip")
        for name in ("batch_size", "target_kl"):
            if getattr(self, name) is not None:
                positive(self, name)
        at_least(self, 0, "entropy_coef", "value_coef")
        fraction(self, "gae_lambda")
        at_most(self, 1_000, "epochs")
        at_most(self, 1e6, "clip", "entropy_coef", "value_coef")
        at_most(self, 1e30, "target_kl")
        if abs(self.log_std_init) > LARGEST_LOG_STD:
            reason = f"must be between {-LARGEST_LOG_STD} and {LARGEST_LOG_STD}"
            raise SettingError("log_std_init", self.log_std_init, reason)
        if self.clip_reward and self.normalize_reward:
            raise SettingError(
                "clip_reward", True, "choose either clip_reward or normalize_reward, not both"
            )

    def refuse_unfit(self, spec: EnvSpec, total_steps: int) -> None:
        """Refuse environments and run lengths that these settings do not fit."""
        rows = self.rollout_steps * spec.num_envs
        if -(-total_steps // spec.num_envs) < self.rollout_steps:
            raise SettingError(
                "total_steps",
                total_steps,
                f"is shorter than one rollout of {rows:,} steps, nothing would be learned: raise "
                "it, or lower agent.rollout_steps or env.num_envs",
            )
        name = "minibatches" if self.batch_size is None else "batch_size"
        if getattr(self, name) > rows:
            raise SettingError(
                f"agent.{name}",
                getattr(self, name),
                f"a rollout has {rows:,} rows (agent.rollout_steps × env.num_envs)",
            )
        if self.normalize_obs and spec.dtype == "uint8":
            reason = "is for vectors; images are scaled to [0, 1] by the network itself"
            raise SettingError("agent.normalize_obs", True, reason)

    def minibatches_of(self, rows: int) -> int:
        """Return into how many minibatches a rollout of so many rows is cut."""
        return self.minibatches if self.batch_size is None else -(-rows // self.batch_size)
