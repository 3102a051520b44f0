"""Types and checks of the `agent.*` keys of PPO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from typing_extensions import override

from steadyrl.agents.learner.schedules import Curve, Schedule, over_the_run, validate_schedules
from steadyrl.agents.settings import (
    LONGEST_GRAPH,
    DistillationSettings,
    RolloutAgentSettings,
)
from steadyrl.core.errors import (
    WIDEST_LAYER,
    SettingError,
    validate_at_most,
    validate_fraction,
    validate_non_negative,
    validate_positive,
)
from steadyrl.envs.types import BoxActions, EnvSpec

KL_TOLERANCE = 1.5  # learning from a rollout ends when KL > this · target_kl
LOWEST_RATE, HIGHEST_RATE = 1e-5, 1e-2  # of a learning rate that follows the KL divergence

DISCRETE_ENTROPY_COEF = 0.02  # where nothing is set
LARGEST_LOG_STD = 20  # e^20 is half a billion
# Compiling pays off after so many times fewer updates of sequences than of single samples, whatever
# their length: a longer graph saves more in each, and takes longer to compile.
SEQUENCE_WEIGHT = 3


class Schedules(NamedTuple):
    """What changes over a run."""

    rate: Schedule
    clip: Schedule
    entropy_coef: Schedule


@dataclass(frozen=True, kw_only=True)
class RNDSettings:
    """Random network distillation: a bonus for states that are new."""

    coef: float
    fraction: float
    gamma: float

    def __post_init__(self) -> None:
        validate_non_negative(self, "coef")
        validate_at_most(self, 1e6, "coef")
        validate_fraction(self, "fraction", "gamma")
        if self.gamma == 1:
            raise SettingError("gamma", 1, "must be below 1: intrinsic returns never end")

    def coefs(self, total_steps: int) -> Schedule:
        """Return the weight of the intrinsic advantages over a run."""
        return Schedule(self.coef, 0.0, "linear", self.fraction * total_steps)


@dataclass(frozen=True, kw_only=True)
class RecurrentSettings:
    """A recurrent cell between trunk and heads, and the sequences it learns from."""

    cell: Literal["none", "gru", "lstm"]
    size: int
    sequence_length: int

    def __post_init__(self) -> None:
        validate_positive(self, "size", "sequence_length")
        validate_at_most(self, WIDEST_LAYER, "size")


@dataclass(frozen=True, kw_only=True)
class PPOSettings(RolloutAgentSettings, DistillationSettings):
    """Proximal policy optimisation."""

    name: Literal["ppo"]
    shared_trunk: bool | None
    log_std_init: float | None
    scale_actions: bool
    adapt_learning_rate: Literal["none", "kl"]
    gae_lambda: float
    batch_size: int | None
    clip: float
    anneal_clip: Curve
    clip_end: float
    clip_warmup: float
    clip_value: bool
    entropy_coef: float | None
    anneal_entropy_coef: Curve
    entropy_coef_end: float
    entropy_coef_warmup: float
    value_coef: float
    target_kl: float | None
    normalize_obs: bool | None
    normalize_reward: bool | None
    popart: bool
    clip_reward: bool
    rnd: RNDSettings
    recurrent: RecurrentSettings

    takes_masks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_positive(self, "clip")
        for name in ("batch_size", "target_kl"):
            if getattr(self, name) is not None:
                validate_positive(self, name)
        validate_non_negative(self, "value_coef")
        if self.entropy_coef is not None:
            validate_non_negative(self, "entropy_coef")
        validate_fraction(self, "gae_lambda")
        validate_schedules(self, "clip", "entropy_coef")
        validate_at_most(
            self, 1e6, "clip", "clip_end", "entropy_coef", "entropy_coef_end", "value_coef"
        )
        validate_at_most(self, 1e30, "target_kl")
        if self.log_std_init is not None and abs(self.log_std_init) > LARGEST_LOG_STD:
            reason = f"must be between {-LARGEST_LOG_STD} and {LARGEST_LOG_STD}"
            raise SettingError("log_std_init", self.log_std_init, reason)
        self._validate_adapted_rate()
        if self.clip_reward and self.normalize_reward:
            raise SettingError(
                "clip_reward", True, "choose either clip_reward or normalize_reward, not both"
            )

    def _validate_adapted_rate(self) -> None:
        if self.adapt_learning_rate == "none":
            return
        if self.target_kl is None:
            reason = "needs agent.target_kl, the KL divergence that the rate is adapted to"
            raise SettingError("adapt_learning_rate", "kl", reason)
        if self.anneal_learning_rate != "constant" or self.learning_rate_warmup:
            reason = (
                "is instead of a schedule: add agent.anneal_learning_rate=constant and "
                "agent.learning_rate_warmup=0"
            )
            raise SettingError("adapt_learning_rate", "kl", reason)
        if not LOWEST_RATE <= self.learning_rate <= HIGHEST_RATE:
            reason = (
                f"must be {LOWEST_RATE:g} to {HIGHEST_RATE:g} with agent.adapt_learning_rate=kl"
            )
            raise SettingError("learning_rate", self.learning_rate, reason)

    @property
    def largest_kl(self) -> float | None:
        """KL divergence that ends learning from a rollout; None where the learning rate adapts."""
        if self.target_kl is None or self.adapt_learning_rate == "kl":
            return None
        return KL_TOLERANCE * self.target_kl

    def normalizes_obs(self, spec: EnvSpec) -> bool:
        """Whether observations are normalised; by default, neither images nor one-hot vectors.

        A 1 that one observation in n has is √n standard deviations: rare states would saturate.
        """
        if self.normalize_obs is not None:
            return self.normalize_obs
        return spec.dtype == "float32" and not spec.one_hot

    @property
    def normalizes_reward(self) -> bool:
        """Whether rewards are normalised; by default, unless they are clipped."""
        return not self.clip_reward if self.normalize_reward is None else self.normalize_reward

    def initial_entropy_coef(self, *, continuous: bool) -> float:
        """Return the entropy coefficient at the start; by default, 0 for continuous actions.

        A Gaussian's entropy has no bound: the bonus widens it at one rate, however wide it is.
        """
        if self.entropy_coef is not None:
            return self.entropy_coef
        return 0.0 if continuous else DISCRETE_ENTROPY_COEF

    @override
    def expected_updates(self, spec: EnvSpec, total_steps: int) -> int:
        """Return the updates of a run; on sequences they count more, as compiling saves more."""
        updates = super().expected_updates(spec, total_steps)
        if not self.is_recurrent:
            return updates
        return updates * SEQUENCE_WEIGHT if self.length <= LONGEST_GRAPH else 0

    def of_rank(self, rank: int, size: int) -> PPOSettings:
        """Return one rank's settings: a minibatch is divided among the ranks."""
        del rank
        self.validate_single_process()
        if self.batch_size is None:
            return self
        self._validate_a_sequence(size, f" on each of {size} processes")
        return replace(self, batch_size=-(-self.batch_size // size))

    @override
    def validate_fit(self, spec: EnvSpec, total_steps: int) -> None:
        super().validate_fit(spec, total_steps)
        if self.normalize_obs and spec.dtype == "uint8":
            reason = "is for vectors; images are scaled to [0, 1] by the network itself"
            raise SettingError("agent.normalize_obs", True, reason)

    @override
    def validate_minibatches(self, samples: int) -> None:
        name = "minibatches" if self.batch_size is None else "batch_size"
        self.validate_at_most_samples(name, samples)
        self._validate_whole_sequences(samples)

    def _validate_whole_sequences(self, samples: int) -> None:
        if not self.is_recurrent:
            return
        sequences = self._num_sequences(samples)
        self._validate_a_sequence(1, "")
        if self.batch_size is None and self.minibatches > sequences:
            reason = (
                f"a rollout has {sequences:,} sequences of {self._length_and_key}: "
                "choose at most so many, or more environments"
            )
            raise SettingError("agent.minibatches", self.minibatches, reason)

    def _validate_a_sequence(self, processes: int, where: str) -> None:
        """Refuse batches that are less than a sequence for each process."""
        if not self.is_recurrent or self.batch_size is None:
            return
        if self.batch_size < processes * self.length:
            reason = f"is less than a sequence of {self._length_and_key}{where}"
            raise SettingError("agent.batch_size", self.batch_size, reason)

    @property
    def extensions(self) -> tuple[str, ...]:
        """The extensions that are on besides a teacher."""
        on = {
            "rnd": self.rnd.coef > 0 and self.rnd.fraction > 0,
            "kl_learning_rate": self.adapt_learning_rate == "kl",
        }
        return tuple(name for name, is_on in on.items() if is_on)

    @property
    def unused(self) -> dict[str, str]:
        """Keys without effect, and why."""
        keys = self.unused_teacher
        if self.batch_size is not None:
            keys["minibatches"] = f"agent.batch_size={self.batch_size} sets the size of minibatches"
        if self.rnd.coef == 0:
            keys |= dict.fromkeys(("rnd.fraction", "rnd.gamma"), "agent.rnd.coef=0")
        elif self.rnd.fraction == 0:
            keys |= dict.fromkeys(("rnd.coef", "rnd.gamma"), "agent.rnd.fraction=0")
        if not self.is_recurrent:
            names = ("recurrent.size", "recurrent.sequence_length")
            keys |= dict.fromkeys(names, "agent.recurrent.cell=none")
        return keys

    def unused_in(self, spec: EnvSpec, total_steps: int) -> dict[str, str]:
        """Return keys without effect in such a run, and why."""
        keys, samples = dict[str, str](), self.rollout_steps * spec.num_envs
        continuous = isinstance(spec.action, BoxActions)
        if not continuous:
            why = f"{spec.id} has no continuous actions"
            keys |= dict.fromkeys(("log_std_init", "scale_actions"), why)
        if self.initial_entropy_coef(continuous=continuous) == self.entropy_coef_end == 0:
            names = ("anneal_entropy_coef", "entropy_coef_end", "entropy_coef_warmup")
            keys |= dict.fromkeys(names, "the entropy coefficient is 0 from start to end")
        if self.is_recurrent and self.recurrent.sequence_length > self.rollout_steps:
            why = f"sequences end with the rollout, after agent.rollout_steps={self.rollout_steps}"
            keys["recurrent.sequence_length"] = why
        if self.rnd.coef > 0 and 0 < self.rnd.fraction * total_steps <= samples:
            why = f"advantages of RND begin with the second rollout, after {samples:,} steps"
            keys |= dict.fromkeys(("rnd.coef", "rnd.fraction", "rnd.gamma"), why)
        return keys

    def warnings_in(self, spec: EnvSpec) -> list[str]:
        """Return a line if minibatches are of one sample, whose normalised advantage is 0."""
        samples = self.rollout_steps * spec.num_envs
        of_one = 2 * self.num_minibatches(samples) > samples + 1  # one may be left over
        if not of_one and self.largest_minibatch(samples) > 1:
            return []
        name = "minibatches" if self.batch_size is None else "batch_size"
        return [
            f"agent.{name}={getattr(self, name)} leaves minibatches of one sample, whose "
            "normalised advantage is 0: the policy does not learn from them (samples of a "
            f"rollout: {samples:,})"
        ]

    def schedules(self, total_steps: int, *, continuous: bool) -> Schedules:
        """Return the schedules of learning rate, clip range and entropy coefficient."""
        clip = self.anneal_clip, self.clip, self.clip_end, self.clip_warmup
        start, end = self.initial_entropy_coef(continuous=continuous), self.entropy_coef_end
        entropy = self.anneal_entropy_coef, start, end, self.entropy_coef_warmup
        return Schedules(
            self.learning_rates(total_steps),
            over_the_run(*clip, total_steps),
            over_the_run(*entropy, total_steps),
        )

    @property
    def entropy_coef_varies(self) -> bool:
        """Whether the entropy coefficient changes over a run."""
        return self.anneal_entropy_coef != "constant" or self.entropy_coef_warmup > 0

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has a recurrent cell."""
        return self.recurrent.cell != "none"

    @property
    def length(self) -> int:
        """Timesteps per sequence; 1 for feedforward policies."""
        if not self.is_recurrent:
            return 1
        return min(self.recurrent.sequence_length, self.rollout_steps)

    @property
    def _length_and_key(self) -> str:
        """The timesteps per sequence, and the key that sets them, for errors."""
        key, chosen = "agent.recurrent.sequence_length", self.recurrent.sequence_length
        if chosen > self.rollout_steps:
            key = f"{key}={chosen} is cut to agent.rollout_steps"
        return f"{self.length} timesteps ({key})"

    @override
    def num_minibatches(self, samples: int) -> int:
        if self.batch_size is None:
            return self.minibatches
        if not self.is_recurrent:
            return -(-samples // self.batch_size)
        return -(-self._num_sequences(samples) // (self.batch_size // self.length))

    @override
    def largest_minibatch(self, samples: int) -> int:
        """Return the size of the largest minibatch; those of sequences are padded to one size."""
        if not self.is_recurrent:
            return super().largest_minibatch(samples)
        sequences = -(-self._num_sequences(samples) // self.num_minibatches(samples))
        microbatches = min(self.grad_accumulation, sequences)
        return -(-sequences // microbatches) * microbatches * self.length

    def _num_sequences(self, samples: int) -> int:
        """Return the number of sequences of a rollout with `samples` samples."""
        return -(-self.rollout_steps // self.length) * (samples // self.rollout_steps)
