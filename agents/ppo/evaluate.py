"""Log-probabilities and values of a whole rollout, in batches."""

from __future__ import annotations

from torch import Tensor

from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.engine.cpu.policy import value_on_host
from steadyrl.agents.engine.engine import Mode
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import Head
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.buffers.rollout.sequences import SequenceRollout

LogProbsAndValues = tuple[Tensor, Tensor]  # log-probabilities and values [B]


class RolloutEvaluator:
    """Compute log-probabilities and values of rollouts, `max_batch_size` samples at a time.

    If the learner is compiled, so is this.
    """

    def __init__(self, learner: Learner, head: Head, max_batch_size: int, mode: Mode) -> None:
        self.max_batch_size = max_batch_size
        self._learner, self._head = learner, head
        self._graph = engine_of(mode).evaluator(
            self._evaluate_functional, learner.network, lambda: learner.stop
        )
        # V(obs[T]) on the host: N observations are too few for a graph of a fixed size. None for
        # subclasses of ActorCritic, which may compute values differently (recurrent).
        module = learner.network.module if self._graph is not None else None
        self.value = value_on_host(module) if type(module) is ActorCritic else None

    def __call__(self, rollout: RolloutBuffer) -> None:
        """Fill in the rollout's log-probabilities and values.

        They come from the network that updates use, so that the first ratio is exactly 1 although
        the host's sums may differ in the last digit.
        """
        stored = (rollout.obs, rollout.action, rollout.log_prob, rollout.value[:-1])
        flat = [tensor.flatten(0, 1) for tensor in stored]
        if isinstance(rollout, SequenceRollout):
            self._evaluate_sequences(rollout, *flat[2:])
            return
        pieces = (tensor.split(self.max_batch_size) for tensor in flat)
        for obs, action, *outputs in zip(*pieces, strict=True):
            for output, scores in zip(outputs, self._evaluate(obs, action), strict=True):
                output.copy_(scores)

    def _evaluate_sequences(
        self, rollout: SequenceRollout, log_prob: Tensor, value: Tensor
    ) -> None:
        """Fill them in sequence by sequence, each from its stored hidden state."""
        for index, batch in rollout.sequential_batches():
            parameters, values, _ = self._learner.forward(
                batch.obs, batch.hidden_state, batch.episode_starts
            )
            scores = self._head.log_prob(parameters, batch.action), values
            inside = index.loss_mask.nonzero().squeeze(1)
            for output, found in zip((log_prob, value), scores, strict=True):
                output[index.timesteps[inside]] = found[inside]

    def _evaluate(self, obs: Tensor, action: Tensor) -> LogProbsAndValues:
        """Return log-probabilities and values [B]."""
        learner = self._learner
        if self._graph is None or learner.uses_autocast or len(obs) != self.max_batch_size:
            return self._evaluate_eager(obs, action)
        log_prob, value = self._graph(learner.network.weights, obs, action)
        return log_prob, value

    def _evaluate_eager(self, obs: Tensor, action: Tensor) -> LogProbsAndValues:
        parameters, value = self._learner.forward(obs)
        return self._head.log_prob(parameters, action), value

    def _evaluate_functional(
        self, weights: Tensor, obs: Tensor, action: Tensor
    ) -> LogProbsAndValues:
        parameters, value = self._learner.network.function(weights)(obs)
        return self._head.log_prob(parameters, action), value
