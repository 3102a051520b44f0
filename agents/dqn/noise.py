"""Noise of noisy networks in updates, as an extension of DQN."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossScalars
from steadyrl.agents.networks.noisy import UpdateNoise


class NoisyUpdates(Extension):
    """Give the loss new noise at each update."""

    _learner: Learner

    def __init__(self, noise: UpdateNoise) -> None:
        self._noise = noise

    @override
    def attach(self, parts: Any) -> None:
        self._learner = parts.learner

    @override
    def loss_scalars(self) -> LossScalars:
        return self._noise.of(self._learner.updates)

    @override
    def attach_comm(self, comm: Comm) -> None:
        self._noise.attach_comm(comm)
