"""What an engine is, and which one a run uses.

An algorithm is a loss in plain torch. How a step on it runs (directly, as one compiled graph, as a
CUDA graph) is the engine's business: nothing above this folder knows. `eager.py` is the reference.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.learner.loss_spec import LossSpec, Tensors
from steadyrl.agents.learner.minibatch import Padding
from steadyrl.agents.learner.optimizers.optimizer import Optimizer
from steadyrl.core.gates.reference import SWITCH, reference_only

log = logging.getLogger("steadyrl")

Mode = Literal["direct", "compiled", "cudagraph"]

Setting = Literal["false", "true", "cudagraph", "auto"]

# Compiling takes 15–30 s (once per machine) and saves a few hundred µs per update of a small
# network: runs with fewer updates are faster without it.
WORTHWHILE_UPDATES = 50_000


class StepParts(NamedTuple):
    """What a learning step reads and changes."""

    spec: LossSpec
    networks: Sequence[FlatNetwork]  # that which learns, then the frozen ones
    optimizer: Optimizer
    comm: Comm  # of several ranks: gradients are summed over them
    stop: Callable[[], Stop]


class StepResult(NamedTuple):
    """What a step returns; the next step may overwrite both."""

    metrics: Tensor  # [K] loss, the spec's metrics and the norm of the gradient
    aux: Tensors  # [B] each; longer than the batch if it was padded


class TrainStep(ABC):
    """One gradient step: gradient, clipping, optimiser, metrics."""

    ready = True  # whether the next step begins at once; else call `prepare` first
    padding: Padding | None = None  # buffers in which batches may be built: none is copied
    repeatable = False  # after a failed call: whether weights and optimiser are still unchanged

    def prepare(  # noqa: B027 - nothing is compiled
        self, batch: Any, weight: float | Tensor | None, rate: float, *scalars: float | Tensor
    ) -> None:
        """Compile for inputs of these shapes, which do not change; may be interrupted."""

    @abstractmethod
    def __call__(
        self, batch: Any, weight: float | Tensor | None, rate: float, *scalars: float | Tensor
    ) -> StepResult:
        """Step on `batch`, undone if the watched metric exceeds its limit.

        `weight`: of each sample [B] or of all in their mean, None: 1/B.
        """

    @abstractmethod
    def try_gradient(self, batch: Any, *scalars: float | Tensor) -> None:
        """Compute the gradient of a batch and drop it; to find out whether there is memory."""


Evaluator = Callable[..., Any]
Collector = TypeVar("Collector")


class Engine(ABC):
    """How learning steps and policies run; what it cannot do runs eagerly, and the log says so."""

    captures = False  # as CUDA graphs, which read their inputs from the same buffers each time
    traces = False  # as one compiled graph, which gathers minibatches at less cost than torch

    @abstractmethod
    def train_step(self, parts: StepParts) -> TrainStep:
        """Return the learning step of these parts."""

    def evaluator(
        self, function: Callable[..., Any], network: FlatNetwork, stop: Callable[[], Stop]
    ) -> Evaluator | None:
        """Return a faster `function` of weights [P] and a batch of a fixed size, or None."""
        return None

    def policy(self, network: nn.Module) -> Any:
        """Return the outputs that actions are taken by as machine code on the host, or None.

        It reads the network's weights where they are. None: torch computes them.
        """
        return None

    def collector(self, build: Callable[[], Collector | None]) -> Collector | None:
        """Return what `build` makes to collect many timesteps in one compiled call, or None."""
        return None


def compile_mode(
    setting: Setting, device: torch.device, expected_updates: int, *, large_images: bool = False
) -> Mode:
    """Select how updates run. A CUDA graph needs no compiler, so it always pays off.

    On the host, convolutions of large images dominate, and Inductor does not speed them up.
    """
    if reference_only():
        log.info("%s=eager: updates and actions run by the reference alone", SWITCH)
        return "direct"
    if setting == "cudagraph":
        if device.type == "cuda":
            return "cudagraph"
        log.warning(
            "agent.compile=cudagraph needs a CUDA device: updates run eagerly on %s", device
        )
        return "direct"
    if setting == "auto":
        if device.type == "cuda":
            return "cudagraph"
        pays = expected_updates >= WORTHWHILE_UPDATES and not large_images
        return "compiled" if pays else "direct"
    return "compiled" if setting == "true" else "direct"
