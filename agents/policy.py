"""A finished policy: weights that act, without replay, rollout or optimiser."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agents.base import Actor
from agents.registry import AgentSettings, agent_class
from envs.types import EnvSpec


def finished_policy(
    settings: AgentSettings,
    spec: EnvSpec,
    weights: Mapping[str, Tensor],
    *,
    device: torch.device,
) -> Actor:
    """Return an actor that decides greedily by `weights`, which are what `Agent.weights` gave.

    The observations' normaliser is among them. It takes any number of environments.
    """
    network, actor = agent_class(settings.name).policy(settings, spec, device)
    own = network.state_dict()
    wrong = [f"no {name}" for name in own.keys() - weights.keys()]
    wrong += [f"{name}, which the network has not" for name in weights.keys() - own.keys()]
    wrong += [
        f"{name} {list(weights[name].shape)} in place of {list(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    if wrong:
        raise ValueError(f"the weights are of another policy: {'; '.join(sorted(wrong))}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
    return actor
