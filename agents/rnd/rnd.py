"""Random network distillation (Burda et al. 2018): intrinsic rewards beside any PPO policy.

RND has a learner of its own, because gradient clipping and the KL limit concern the policy alone,
whose loss may vary (sequences, a teacher). It trains on every sample once per rollout: prediction
errors would vanish with more. It is idle in the first rollout, before observations have statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from steadyrl.agents.engine.engine import Engine
from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.interrupt import Interrupted
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.learner.reward_normaliser import RewardNormaliser
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.encoders import build_trunk
from steadyrl.agents.networks.hidden import matrices_after_first
from steadyrl.agents.networks.init import all_values_set, materialize, on_meta, uniform_
from steadyrl.agents.networks.normalizers import ObservationNormaliser
from steadyrl.agents.networks.settings import NetworkSettings
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.buffers.memory_layout import HOST
from steadyrl.buffers.rollout.buffer import RolloutBuffer, prefaulted
from steadyrl.core.jit import jit
from steadyrl.core.metrics import Metrics
from steadyrl.core.state import Stateful
from steadyrl.envs.types import EnvSpec
from steadyrl.memory.budget import require, shown

CLIP = 5.0  # standard deviations of normalised observations (Burda et al. 2018)
ERROR_DECAY = 0.9  # per rollout, of earlier errors in their running scale

METRICS = ("train/rnd_loss", "train/rnd_value_loss")


class RNDBatch(NamedTuple):
    """B valid samples; observations normalised for these networks."""

    obs: Tensor  # [B, …]
    next_obs: Tensor  # [B, …] also where the episode ended
    features: Tensor  # [B, K] of the target network, for next_obs
    return_: Tensor  # [B]


class RNDNetwork(nn.Module):
    """Predictor of the target network's features, and value head of intrinsic returns."""

    def __init__(self, shape: Sequence[int], hidden: Sequence[int], network: NetworkSettings):
        super().__init__()
        self.normaliser = ObservationNormaliser(tuple(shape), clip=CLIP)
        # One layer deeper than the target network.
        self.predictor = feature_network(shape, (*hidden, hidden[-1]), network)
        trunk, size = build_trunk(shape, "float32", hidden, with_relu(network))
        self.value = nn.Sequential(trunk, nn.Linear(size, 1))

    def forward(self, obs: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return values [B] of normalised observations, and features [B, K] of the next ones."""
        return self.value(obs).squeeze(-1), self.predictor(next_obs)

    def hidden_matrices(self) -> dict[str, int]:
        """Return the names of weights between hidden layers, with the matrices in each."""
        return matrices_after_first(self, "predictor.0", "value.0")


def feature_network(
    shape: Sequence[int], hidden: Sequence[int], network: NetworkSettings
) -> nn.Module:
    """Build a network with as many features as its last hidden layer."""
    trunk, size = build_trunk(shape, "float32", hidden, with_relu(network))
    return nn.Sequential(trunk, nn.Linear(size, size))


def with_relu(network: NetworkSettings) -> NetworkSettings:
    """Return the policy's settings with ReLU: tanh saturates on distant observations."""
    return replace(network, activation="relu")


def reset_parameters(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise every layer as U(−2/√fan_in, 2/√fan_in), so that ReLUs have kinks within the data.

    Without nonzero biases, features of few inputs extrapolate so well that nothing is novel. Norms
    keep gains of 1.
    """
    uniform_(module, generator)
    for layer in module.modules():
        if isinstance(layer, ObservationNormaliser):
            layer.reset_parameters()
        elif not isinstance(layer, nn.LayerNorm | nn.GroupNorm):
            for parameter in layer.parameters(recurse=False):
                parameter.data.mul_(2)


def prediction_error(predicted: Tensor, target: Tensor) -> Tensor:
    """Return mean (f̂ − f)² [B] over the features [B, K]."""
    return F.mse_loss(predicted, target, reduction="none").mean(-1)


def rnd_loss(
    network: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], batch: RNDBatch
) -> PerSampleLoss:
    """Return e(o') + (V(o) − R)² per sample [B], and both terms as metrics."""
    value, predicted = network(batch.obs, batch.next_obs)
    error = prediction_error(predicted, batch.features)
    squares = F.mse_loss(value, batch.return_, reduction="none")
    return PerSampleLoss(error + squares, (error, squares))


@jit
def non_episodic_gae(  # type: ignore[no-untyped-def]
    reward, value, valid, gamma, gae_lambda, advantage
):
    """Write A_t = δ_t + γλA_t', δ_t = r_t + γV(o_t') − V(o_t) [T, N], t' being the next valid step.

    Returns are non-episodic: they continue through terminations and truncations. The step that
    resets an environment is skipped, so the next episode's first observation follows.
    """
    steps, envs = reward.shape
    for env in range(envs):
        next_advantage, next_value = 0.0, value[steps, env]
        for t in range(steps - 1, -1, -1):
            if not valid[t, env]:
                advantage[t, env] = 0.0
                continue
            delta = reward[t, env] + gamma * next_value - value[t, env]
            next_advantage = delta + gamma * gae_lambda * next_advantage
            advantage[t, env] = next_advantage
            next_value = value[t, env]


class RolloutOutputs(NamedTuple):
    """RND's outputs for the observations of a rollout, and for the next observation at t = T."""

    features: Tensor  # [T + 1, N, K] of the target network
    error: Tensor  # [T + 1, N]
    value: Tensor  # [T + 1, N]
    last: Tensor  # [N, …] the observation at t = T
    return_: Tensor  # [T, N]


class RND(Stateful):
    """Target network, predictor, intrinsic values and the running scales of both."""

    state_names = ("learner", "_target", "_has_statistics")

    def __init__(
        self, settings: PPOSettings, spec: EnvSpec, device: torch.device, engine: Engine, seed: int
    ) -> None:
        samples = settings.rollout_steps * spec.num_envs
        self._settings = settings
        self._masks = Masks.of(spec, device)
        self._comm: Comm = SINGLE_PROCESS
        self._has_statistics = False  # whether observations have statistics
        self._minibatch_count = settings.num_minibatches(samples)
        self._minibatch_size = -(-samples // self._minibatch_count)
        with on_meta():
            trained = RNDNetwork(spec.unmasked_shape, settings.hidden, settings.network)
            fixed = feature_network(spec.unmasked_shape, settings.hidden, settings.network)
        _require_memory(settings, spec, trained, device, self._minibatch_size)
        generator = torch.Generator().manual_seed(seed)
        for module in (trained, fixed):
            with all_values_set(materialize(module, HOST)):
                reset_parameters(module, generator)
        loss_spec = LossSpec(
            loss=rnd_loss,
            metrics=METRICS,
            optimizer=settings.optimizer,
            max_grad_norm=settings.max_grad_norm,
            grad_accumulation=settings.grad_accumulation,
            max_batch_size=self._minibatch_size,
        )
        self.learner = Learner(loss_spec, FlatNetwork(trained, device), engine)
        self._module, self._statistics = trained, trained.normaliser
        self._target = FlatNetwork(fixed, device, learns=False)
        self.rewards = RewardNormaliser(spec.num_envs, settings.rnd.gamma, episodic=False)
        every = (settings.rollout_steps + 1, spec.num_envs)
        dtype = getattr(torch, spec.dtype)
        self._outputs = RolloutOutputs(
            prefaulted((*every, settings.hidden[-1]), torch.float32, device),
            prefaulted(every, torch.float32, device),
            prefaulted(every, torch.float32, device),
            prefaulted((spec.num_envs, *spec.observation_shape), dtype, device),
            prefaulted((settings.rollout_steps, spec.num_envs), torch.float32, device),
        )

    def attach_comm(self, comm: Comm) -> None:
        """Collective: one RND for all ranks, trained on the samples of all of them."""
        self._comm = self._statistics.comm = self.rewards.comm = comm
        self.learner.attach_comm(comm)
        self._target.attach_comm(comm)

    @property
    def nbytes(self) -> int:
        """Bytes of the networks and of a rollout's outputs."""
        outputs = sum(part.nbytes for part in self._outputs)
        return self.learner.nbytes + self._target.nbytes + outputs

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Restore networks and statistics if Interrupted is raised inside."""
        before = self.rewards.state_dict()
        try:
            with self.learner.transaction():
                yield
        except Interrupted:
            self.rewards.load_state_dict(before)
            raise

    @torch.no_grad()
    def add_advantages(self, rollout: RolloutBuffer, last: Tensor, coef: float) -> None:
        """Collective: add intrinsic advantages to a rollout's; `last` [N, …] is the observation at
        t = T.

        Errors are divided by the standard deviation of their discounted sums. Extrinsic values
        and returns do not change.
        """
        if not self._has_statistics:
            return
        outputs, s = self._outputs, self._settings
        outputs.last.copy_(last)
        self._evaluate(rollout.obs.flatten(0, 1), slice(None, -1))
        self._evaluate(outputs.last, slice(-1, None))
        # Synchronises with the device.
        error, value = torch.stack((outputs.error, outputs.value)).cpu().numpy()
        valid = rollout.valid.numpy()
        reward = error[1:] * valid
        self.rewards.add(reward, valid)
        reward *= self.rewards.scale
        self.rewards.decay(ERROR_DECAY)
        advantage = reward.copy()
        non_episodic_gae(reward, value, valid, s.rnd.gamma, s.gae_lambda, advantage)
        intrinsic = torch.from_numpy(advantage).to(outputs.value.device)
        torch.add(intrinsic, outputs.value[:-1], out=outputs.return_)
        rollout.advantage.add_(intrinsic, alpha=coef)

    def learn(
        self, rollout: RolloutBuffer, generator: torch.Generator, rate: float
    ) -> Metrics | None:
        """Collective: train on every sample of the rollout once."""
        if not self._has_statistics:
            return None
        for indices, sample_weight in self._minibatches(rollout, generator):
            if self.learner.stop.confirmed:
                raise Interrupted
            self.learner.sample_weight = sample_weight
            self.learner.step(self._batch(rollout, indices), rate)
        return self.learner.means()

    def update_statistics(
        self, rollout: RolloutBuffer, known: ObservationNormaliser | None
    ) -> None:
        """Collective: count a rollout's observations, or copy the statistics of `known`.

        `known` is given if the rollout's observations are normalised already.
        """
        self._has_statistics = True
        if known is not None:
            self._statistics.copy_statistics_(known)
            return
        obs, valid = rollout.obs.flatten(0, 1), rollout.valid_indices
        chunks = valid.split(self._minibatch_size)
        self._statistics.update_chunked(
            lambda: (self._features(obs.index_select(0, part)) for part in chunks)
        )

    def _evaluate(self, obs: Tensor, timesteps: slice) -> None:
        """Write the outputs for these timesteps, given their observations [M, …]."""
        whole = self._outputs
        parts = (
            part[timesteps].flatten(0, 1) for part in (whole.features, whole.error, whole.value)
        )
        chunks = (part.split(self._minibatch_size) for part in (obs, *parts))
        for some, outputs, error, value in zip(*chunks, strict=True):
            normal = self._statistics(self._features(some))
            values, predicted = self._module(normal, normal)
            outputs.copy_(self._target.module(normal))
            value.copy_(values)
            error.copy_(prediction_error(predicted, outputs))

    def _minibatches(
        self, rollout: RolloutBuffer, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, float | None]]:
        """Collective: yield one epoch: indices [M] and the sample weight over all ranks.

        A rank without samples in a part contributes one of weight 0.
        """
        parts = rollout.shuffled(generator).tensor_split(self._minibatch_count)
        if self._comm.is_single:
            yield from ((part, None) for part in parts if len(part))
            return
        counts = self._outputs.value.new_tensor([len(part) for part in parts], dtype=torch.float64)
        for part, total in zip(parts, self._comm.all_reduce_(counts).tolist(), strict=True):
            if total:
                yield (part, 1 / total) if len(part) else (part.new_zeros(1), 0.0)

    @torch.no_grad()
    def _batch(self, rollout: RolloutBuffer, indices: Tensor) -> RNDBatch:
        outputs, obs = self._outputs, rollout.obs.flatten(0, 1)
        after = indices + len(outputs.last)
        inside = (after < len(obs)).view(-1, *(1 for _ in obs.shape[1:]))
        later = obs.index_select(0, after.clamp(max=len(obs) - 1))
        next_obs = torch.where(inside, later, outputs.last[indices % len(outputs.last)])
        now, then = (
            self._statistics(self._features(each))
            for each in (obs.index_select(0, indices), next_obs)
        )
        features = outputs.features.flatten(0, 1).index_select(0, after)
        return RNDBatch(now, then, features, outputs.return_.flatten().index_select(0, indices))

    def _features(self, obs: Tensor) -> Tensor:
        return obs if self._masks is None else self._masks.features(obs)


def _require_memory(
    settings: PPOSettings,
    spec: EnvSpec,
    trained: RNDNetwork,
    device: torch.device,
    minibatch_size: int,
) -> None:
    """Refuse what does not fit: networks, a rollout's outputs, and float minibatches."""
    timesteps = (settings.rollout_steps + 1) * spec.num_envs
    outputs = 4 * timesteps * (settings.hidden[-1] + 3)
    batch = 4 * minibatch_size * (6 * math.prod(spec.unmasked_shape) + settings.hidden[-1])
    networks = 8 * sum(parameter.nbytes for parameter in trained.parameters())
    require(shown("curiosity"), outputs + batch + networks, device=device)
