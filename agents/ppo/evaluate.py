"""Values and log-probabilities of a whole rollout, in batches."""

from __future__ import annotations

import torch
from torch import Tensor

from steadyrl.agents.engine.cpu.policy import value_on_host
from steadyrl.agents.engine.engine import Mode
from steadyrl.agents.engine.inductor import Compiled
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import Head
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.buffers.rollout.sequences import SequenceRollout
from steadyrl.core.cuda_graph import host_sees

Scores = tuple[Tensor, Tensor]  # log-probabilities and values [B]


class Scoring:
    """Completes rollouts, so many `rows` at a time: by a graph where a learner has one."""

    def __init__(self, learner: Learner, head: Head, rows: int, mode: Mode) -> None:
        self.rows = rows
        self._learner, self._head = learner, head
        graph = Compiled(self._pure, lambda _, *read: self._eager(*read), "the network")
        pays = mode == "compiled" and host_sees(learner.network.weights)  # measured there only
        self._graph = graph if pays else None
        # Of the observations after the last row: too few for a graph that has one size. None
        # for networks that only build on this one: those may value in another way (a memory).
        module = learner.network.module
        self.value = value_on_host(module) if pays and type(module) is ActorCritic else None

    def __call__(self, rollout: RolloutBuffer) -> None:
        """Complete log-probabilities and values.

        They come from the network that the update uses, so that its first ratio is 1 although
        NumPy's sums may differ from torch's in the last digit.
        """
        stored = (rollout.obs, rollout.action, rollout.log_prob, rollout.value[:-1])
        flat = [tensor.flatten(0, 1) for tensor in stored]
        if isinstance(rollout, SequenceRollout):
            self._remembering(rollout, *flat[2:])
            return
        pieces = (tensor.split(self.rows) for tensor in flat)
        for obs, action, *places in zip(*pieces, strict=True):
            for place, scores in zip(places, self._of(obs, action), strict=True):
                place.copy_(scores)

    def _remembering(self, rollout: SequenceRollout, log_prob: Tensor, value: Tensor) -> None:
        """Complete them sequence by sequence, each from what was remembered before it."""
        for index, batch in rollout.sequential_batches():
            parameters, values, _ = self._learner.forward(batch.obs, batch.carry, batch.starts)
            scores = self._head.log_prob(parameters, batch.action), values
            inside = index.loss_mask.nonzero().squeeze(1)
            for place, found in zip((log_prob, value), scores, strict=True):
                place[index.timesteps[inside]] = found[inside]

    def _of(self, obs: Tensor, action: Tensor) -> Scores:
        """Return log-probabilities and values [B]."""
        graph, learner = self._graph, self._learner
        if graph is None or learner.rounds or len(obs) != self.rows:
            return self._eager(obs, action)
        arguments = learner.network.weights, obs, action
        if not graph.built:
            with learner.stop.at_once(), torch.inference_mode(False):
                graph.build(arguments)
        log_prob, value = graph(*arguments)
        return log_prob, value

    def _eager(self, obs: Tensor, action: Tensor) -> Scores:
        parameters, value = self._learner.forward(obs)
        return self._head.log_prob(parameters, action), value

    def _pure(self, weights: Tensor, obs: Tensor, action: Tensor) -> Scores:
        parameters, value = self._learner.network.function(weights)(obs)
        return self._head.log_prob(parameters, action), value
