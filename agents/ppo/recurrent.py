"""PPO with a recurrent policy: minibatches of sequences, and values from hidden states."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.actors.recurrent import RecurrentSamplingActor
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.statistics import count_sum_sumsq
from steadyrl.agents.networks.distributions import Head
from steadyrl.agents.ppo.advantages import RolloutEvaluator
from steadyrl.agents.ppo.minibatches import normalize_by_moments
from steadyrl.agents.rollout_agent import Minibatch, Minibatches
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.buffers.rollout.sequences import SequenceRollout


def sequence_minibatches(*, epochs: int, count: int, comm: Comm = SINGLE_PROCESS) -> Minibatches:
    """Return minibatches of whole sequences, of one process or of all ranks."""

    def minibatches(rollout: RolloutBuffer, order: torch.Generator) -> Iterator[Minibatch]:
        assert isinstance(rollout, SequenceRollout)
        for _ in range(epochs):
            yield from sequence_epoch(rollout, count, order, comm)

    return minibatches


def sequence_epoch(
    rollout: SequenceRollout, count: int, generator: torch.Generator, comm: Comm
) -> Iterator[Minibatch]:
    """Collective: yield one epoch of sequences with sample weights, advantages normalised."""
    parts, advantage = list(rollout.shuffled_sequences(count, generator)), rollout.flat().advantage
    own = [count_sum_sumsq(advantage[index.timesteps], index.loss_mask) for index in parts]
    moments = comm.all_reduce_(torch.stack(own)).tolist()
    for index, (samples, *sums) in zip(parts, moments, strict=True):
        if not samples:
            continue
        batch, loss_mask = rollout.batch(index), index.loss_mask.float()
        normal = normalize_by_moments(batch.advantage, samples, *sums) * loss_mask
        yield batch._replace(advantage=normal), loss_mask / samples


class SequenceEvaluator(RolloutEvaluator):
    """Compute log-probabilities and values of a recurrent policy's rollout.

    It does so sequence by sequence, each from its stored hidden state.
    """

    def __init__(
        self, learner: Learner, head: Head, max_batch_size: int, actor: RecurrentSamplingActor
    ) -> None:
        super().__init__(learner, head, max_batch_size, engine_of("direct"), actor_evaluates=True)
        self._actor = actor

    @override
    def evaluate(self, rollout: RolloutBuffer) -> None:
        assert isinstance(rollout, SequenceRollout)
        stored = [part.flatten(0, 1) for part in (rollout.log_prob, rollout.value[:-1])]
        for index, batch in rollout.sequential_batches():
            parameters, values, _ = self._learner.forward(
                batch.obs, batch.hidden_state, batch.episode_starts
            )
            scores = self._head.log_prob(parameters, batch.action), values
            inside = index.loss_mask.nonzero().squeeze(1)
            for output, found in zip(stored, scores, strict=True):
                output[index.timesteps[inside]] = found[inside]

    @override
    def last_value(self, rollout: RolloutBuffer, obs: Tensor) -> Tensor:
        """Return V(obs[T]) [N], from the actor's hidden state."""
        valid = rollout.valid[-1].numpy()
        return self._actor.values(obs, valid, self._learner.forward)
