"""The optimisers by name: state, step, and the step in operations that a graph can fuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.optimizers.adam import (
    AdamState,
    adam_,
    adam_state,
    adam_traceable_,
    check_adam_state,
)
from steadyrl.agents.learner.optimizers.muon import Layout, MuonState, check_momentum, muon_
from steadyrl.agents.learner.optimizers.radam import radam_
from steadyrl.agents.learner.optimizers.settings import OptimizerSettings
from steadyrl.core.errors import SettingError

State = AdamState | MuonState
Step = Callable[[Tensor, Tensor, Any, Tensor], None]  # (weights [P], gradient [P], state, rate [])


class Optimizer(NamedTuple):
    """An update rule for flat weights [P], and its state before the first step."""

    state: State
    step_: Step  # in place
    traceable_step_: Step  # the same in plain operations


def build_optimizer(settings: OptimizerSettings, network: FlatNetwork) -> Optimizer:
    """Return the optimiser of a network."""
    how: dict[str, Any] = {"epsilon": settings.eps, "weight_decay": settings.weight_decay}
    if settings.name == "muon":
        return build_muon(network, **how)
    state = adam_state(network.weights)
    if settings.name == "radam":
        return Optimizer(state, *(partial(radam_, **how),) * 2)
    how["decoupled"] = settings.name == "adamw"
    return Optimizer(state, partial(adam_, **how), partial(adam_traceable_, **how))


def build_muon(network: FlatNetwork, **how: Any) -> Optimizer:
    """Return Muon for a network that has matrices between hidden layers.

    Its `hidden_matrices` returns their parameters by name, and the matrices in each.
    """
    hidden: dict[str, int] = getattr(network.module, "hidden_matrices", dict)()
    if not hidden:
        reason = (
            "is for matrices between two hidden layers, and this network has none: add a layer to "
            "agent.hidden, or use adamw"
        )
        raise SettingError("agent.optimizer.name", "muon", reason)
    layout, weights = Layout(network.shapes, hidden), network.weights
    others = adam_state(weights.new_empty(len(weights) - layout.numel()))
    state = MuonState(weights.new_zeros(layout.numel()), *others)
    return Optimizer(state, *(partial(muon_, layout=layout, **how),) * 2)


def check_state(state: State, updates: int, *, skips: bool) -> None:
    """Raise ValueError if the state is impossible after `updates` updates.

    `skips`: some steps may not have counted.
    """
    if isinstance(state, MuonState):
        check_momentum(state)
        state = state.of_others
    check_adam_state(state, updates, skips=skips)


def nbytes(state: State) -> int:
    """Return the bytes of the moments."""
    return sum(part.nbytes for part in state if part.ndim)
