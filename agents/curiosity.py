"""Curiosity by random network distillation: rewards what is new, beside whatever policy learns.

It has a learner of its own: the gradient's norm, which is clipped, and the KL divergence, at which
steps are undone, are the policy's own business, and a policy's loss may be any (of sequences, with
a teacher). It learns from every row once: what is learned at once is new no more. Nothing happens
in the first rollout, before which observations have no scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from agents.compiling import Mode
from agents.learner import Learner
from agents.masking import Masks
from agents.networks import FlatNetwork, with_memory
from agents.normaliser import ObservationNormaliser, RewardNormaliser
from agents.novelty import (
    METRICS,
    Novelty,
    NoveltyBatch,
    endless_advantages,
    features,
    novelty,
    novelty_loss,
    start_,
)
from agents.ppo_loss import ADAM_EPSILON
from agents.ppo_settings import PPOSettings
from agents.recipe import Recipe
from agents.stopping import CutShortError
from agents.world import ALONE, World
from buffers.rollout import RolloutBuffer, touched
from envs.types import EnvSpec
from memory.budget import require
from memory.metrics import Metrics
from memory.state import Stateful

HOST = torch.device("cpu")
FADING = 0.9  # of what a rollout's errors count for in their scale, with every later one


class Told(NamedTuple):
    """What is told of the observations of a rollout and of those after it, row T."""

    features: Tensor  # [T + 1, N, K] by the fixed network
    error: Tensor  # [T + 1, N]
    value: Tensor  # [T + 1, N]
    last: Tensor  # [N, …] row T as it is stored
    return_: Tensor  # [T, N]


class Curiosity(Stateful):
    """A fixed network, what predicts it, the value of its rewards, and their running scales."""

    state_names = ("learner", "_target", "_knows")

    def __init__(
        self, settings: PPOSettings, spec: EnvSpec, device: torch.device, mode: Mode, seed: int
    ) -> None:
        rows = settings.rollout_steps * spec.num_envs
        self._settings = settings
        self._masks = Masks.of(spec, device)
        self._world: World = ALONE
        self._knows = False  # whether there is a scale of observations
        self._parts = settings.minibatches_of(rows)
        self._piece = -(-rows // self._parts)
        with torch.device("meta"):
            learned = Novelty(spec.seen_shape, settings.hidden, settings.network)
            fixed = features(spec.seen_shape, settings.hidden, settings.network)
        _ask_for_memory(settings, spec, learned, device, self._piece)
        generator = torch.Generator().manual_seed(seed)
        for module in (learned, fixed):
            start_(with_memory(module, HOST), generator)
        learned.normaliser.start_()
        recipe = Recipe(
            loss=novelty_loss,
            metrics=METRICS,
            epsilon=ADAM_EPSILON,
            max_grad_norm=settings.max_grad_norm,
            grad_accumulation=settings.grad_accumulation,
            rows=self._piece,
        )
        self.learner = Learner(recipe, FlatNetwork(learned, device), mode)
        self._module, self._statistics = learned, learned.normaliser
        self._target = FlatNetwork(fixed, device)
        self.rewards = RewardNormaliser(spec.num_envs, settings.rnd_gamma, episodic=False)
        every = (settings.rollout_steps + 1, spec.num_envs)
        dtype = getattr(torch, spec.dtype)
        self._told = Told(
            touched((*every, settings.hidden[-1]), torch.float32, device),
            touched(every, torch.float32, device),
            touched(every, torch.float32, device),
            touched((spec.num_envs, *spec.observation_shape), dtype, device),
            touched((settings.rollout_steps, spec.num_envs), torch.float32, device),
        )

    def join(self, world: World) -> None:
        """Together: one novelty for all ranks, by the rows that all of them have seen."""
        self._world = self._statistics.world = self.rewards.world = world
        self.learner.join(world)
        self._target.join(world)

    @property
    def nbytes(self) -> int:
        """Bytes of the networks and of what is told of a rollout."""
        told = sum(part.nbytes for part in self._told)
        return self.learner.nbytes + self._target.nbytes + told

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Take back all that was learned and counted if CutShortError ends it."""
        before = self.rewards.state_dict()
        try:
            with self.learner.all_or_nothing():
                yield
        except CutShortError:
            self.rewards.load_state_dict(before)
            raise

    @torch.no_grad()
    def reward(self, rollout: RolloutBuffer, last: Tensor, coef: float) -> None:
        """Together: add novelty's to the advantages of a rollout, which `last` [N, …] follow.

        Errors are divided by the deviation of their discounted sums. Values and returns of what
        the environments reward stay as they are.
        """
        if not self._knows:
            return
        told, s = self._told, self._settings
        told.last.copy_(last)
        self._look(rollout.obs.flatten(0, 1), slice(None, -1))
        self._look(told.last, slice(-1, None))
        error, value = torch.stack((told.error, told.value)).cpu().numpy()  # waits for a device
        valid = rollout.flags[2].numpy()
        reward = error[1:] * valid
        self.rewards.add(reward, valid)
        reward *= self.rewards.scale
        self.rewards.fade(FADING)
        advantage = reward.copy()
        endless_advantages(reward, value, valid, s.rnd_gamma, s.gae_lambda, advantage)
        worth = torch.from_numpy(advantage).to(told.value.device)
        torch.add(worth, told.value[:-1], out=told.return_)
        rollout.advantage.add_(worth, alpha=coef)

    def learn(
        self, rollout: RolloutBuffer, generator: torch.Generator, rate: float
    ) -> Metrics | None:
        """Together: learn from every row of the rewarded rollout once."""
        if not self._knows:
            return None
        for rows, share in self._minibatches(rollout, generator):
            if self.learner.stop.requested:
                raise CutShortError
            self.learner.share = share
            self.learner.step(self._batch(rollout, rows), rate)
        return self.learner.means()

    def take_in(self, rollout: RolloutBuffer, known: ObservationNormaliser | None) -> None:
        """Together: count a rollout's observations, or take over the statistics that `known` has.

        So it is where the rollout's rows are normalised already.
        """
        self._knows = True
        if known is not None:
            self._statistics.take_over(known)
            return
        obs, valid = rollout.obs.flatten(0, 1), rollout.valid
        pieces = valid.split(self._piece)
        self._statistics.update_by(
            lambda: (self._seen(obs.index_select(0, rows)) for rows in pieces)
        )

    def _look(self, obs: Tensor, rows: slice) -> None:
        """Fill in what is told of these rows, given their observations [M, …]."""
        whole = self._told
        parts = (part[rows].flatten(0, 1) for part in (whole.features, whole.error, whole.value))
        pieces = (part.split(self._piece) for part in (obs, *parts))
        for some, told, error, value in zip(*pieces, strict=True):
            normal = self._statistics(self._seen(some))
            values, predicted = self._module(normal, normal)
            told.copy_(self._target.module(normal))
            value.copy_(values)
            error.copy_(novelty(predicted, told))

    def _minibatches(
        self, rollout: RolloutBuffer, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, float | None]]:
        """Together: yield one epoch: rows [M], and what one of them counts for among all ranks'.

        A rank that has no row in a part gives one that counts for nothing.
        """
        parts = rollout.shuffled(generator).tensor_split(self._parts)
        if self._world.alone:
            yield from ((rows, None) for rows in parts if len(rows))
            return
        counts = self._told.value.new_tensor([len(rows) for rows in parts], dtype=torch.float64)
        for rows, total in zip(parts, self._world.sum_(counts).tolist(), strict=True):
            if total:
                yield (rows, 1 / total) if len(rows) else (rows.new_zeros(1), 0.0)

    @torch.no_grad()
    def _batch(self, rollout: RolloutBuffer, rows: Tensor) -> NoveltyBatch:
        told, obs = self._told, rollout.obs.flatten(0, 1)
        after = rows + len(told.last)
        inside = (after < len(obs)).view(-1, *(1 for _ in obs.shape[1:]))
        later = obs.index_select(0, after.clamp(max=len(obs) - 1))
        following = torch.where(inside, later, told.last[rows % len(told.last)])
        now, then = (
            self._statistics(self._seen(each)) for each in (obs.index_select(0, rows), following)
        )
        features = told.features.flatten(0, 1).index_select(0, after)
        return NoveltyBatch(now, then, features, told.return_.flatten().index_select(0, rows))

    def _seen(self, obs: Tensor) -> Tensor:
        return obs if self._masks is None else self._masks.seen(obs)


def _ask_for_memory(
    settings: PPOSettings, spec: EnvSpec, learned: Novelty, device: torch.device, piece: int
) -> None:
    """Refuse what does not fit: networks, what is told of a rollout, and minibatches of floats."""
    rows = (settings.rollout_steps + 1) * spec.num_envs
    told = 4 * rows * (settings.hidden[-1] + 3)
    batch = 4 * piece * (6 * math.prod(spec.seen_shape) + settings.hidden[-1])
    networks = 9 * sum(parameter.nbytes for parameter in learned.parameters())
    where = device if device.type == "cuda" else None
    require("curiosity", told + batch + networks, device=where)
