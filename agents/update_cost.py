"""The cost of an update in FLOP, which decides the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from steadyrl.agents.registry import AgentSettings, HasBatchSize, agent_class
from steadyrl.envs.types import EnvSpec

UNKNOWN_BATCH = 256  # observations per update of algorithms without `update_batch`
FLOP_PER_WEIGHT = 6  # a multiplication and an addition, forward once and backward twice


class UpdateCost(NamedTuple):
    """The cost of one gradient step."""

    flop: int  # of dense layers; convolutions use each weight many times more
    convolves: bool


def update_cost(settings: AgentSettings, spec: EnvSpec) -> UpdateCost:
    """Return the cost of an update, estimated from the policy network."""
    try:
        # On the meta device: nothing is allocated.
        network, _ = agent_class(settings.name).policy(settings, spec, torch.device("meta"))
    except Exception:  # user code that may not support the meta device
        return UpdateCost(0, len(spec.unmasked_shape) == 3)
    batch = settings.update_batch(spec) if isinstance(settings, HasBatchSize) else UNKNOWN_BATCH
    weights = sum(parameter.numel() for parameter in network.parameters())
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    convolves = any(isinstance(module, kinds) for module in network.modules())
    return UpdateCost(FLOP_PER_WEIGHT * weights * batch, convolves)
