"""A learning step that a device has no memory for: repeated once, or ended with what would fit."""

import gc
import logging
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from steadyrl.agents.engine.choice import ENGINES
from steadyrl.agents.engine.direct import DirectEngine
from steadyrl.agents.engine.eager import EagerEngine
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec
from steadyrl.agents.learner.out_of_memory import _largest_that_fits
from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.gpu.limit import limited
from tests.agents.learner.test_learner import PLAIN, line, points, squares

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"


class FullCard:
    """A loss whose first `failures` calls, and all of batches above `most`, find no memory."""

    def __init__(self, failures=0, most=10**9):
        self.failures, self.most = failures, most

    def __call__(self, network, batch, scale=1.0):
        found = squares(network, batch, scale)
        self.failures -= 1
        if self.failures >= 0 or len(batch.y) > self.most:
            raise torch.OutOfMemoryError(FULL)
        return found


def learner_of(engine, loss, **changes):
    torch.manual_seed(0)
    spec = replace(PLAIN, loss=loss, **changes)
    return Learner(spec, FlatNetwork(nn.Linear(1, 1), torch.device("cpu")), engine())


@pytest.mark.parametrize("engine", [EagerEngine, DirectEngine])
def test_a_step_that_changed_nothing_yet_is_repeated(engine, caplog):
    full, plain = learner_of(engine, FullCard(failures=1)), learner_of(engine, squares)
    for i in range(3):
        for learner in (full, plain):
            learner.step(points(8, i), 1e-2)
    assert torch.equal(full.network.weights, plain.network.weights)
    assert full.updates == plain.updates == 3
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "no memory is left on cpu for an update" in warning and "2.00 GiB)" in warning


def test_a_step_that_does_not_fit_says_what_would():
    learner = line(loss=FullCard(most=300), grad_accumulation=2)
    before = learner.network.weights.clone()
    with pytest.raises(MemoryBudgetError) as caught:
        learner.step(points(2000), 1e-2)
    text = str(caught.value)
    assert "an update of 2,000 samples does not fit on cpu" in text
    assert "500 do: agent.grad_accumulation=8 takes the same steps" in text
    assert torch.equal(learner.network.weights, before) and learner.updates == 0
    line(loss=FullCard(most=300), grad_accumulation=8).step(points(2000), 1e-2)  # true


def test_a_network_without_room_for_a_sample_is_said_to_be_too_large():
    with pytest.raises(MemoryBudgetError, match="nor does one sample: make the network smaller"):
        line(loss=FullCard(most=0)).step(points(4), 1e-2)


@pytest.mark.parametrize(("engine", "update"), [(EagerEngine, "apply"), (DirectEngine, "update")])
def test_a_step_that_may_have_changed_something_is_not_repeated(engine, update, monkeypatch):
    learner, calls = learner_of(engine, squares), []

    def full(*_):
        calls.append(1)
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(learner.train_step, update, full)
    with pytest.raises(torch.OutOfMemoryError):
        learner.step(points(4), 1e-2)
    assert calls == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["direct", "cudagraph"])
def test_garbage_on_a_card_is_cleaned_before_the_step_is_repeated(mode, caplog):
    """Of two equal learners, one whose card is full of garbage in cycles learns the same."""
    card, weights = torch.device("cuda", 0), []
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20_000, 1, generator=generator), torch.randn(20_000, generator=generator)
    batch = type(points(1))(x.to(card), y.to(card))
    for garbage in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Linear(256, 1))
        spec: LossSpec = replace(PLAIN, loss=squares)
        learner = Learner(spec, FlatNetwork(network, card), ENGINES[mode]())
        learner.step(batch, 1e-2)
        gc.collect()
        torch.cuda.empty_cache()
        limit_mb = torch.cuda.memory_allocated(card) / 1e6 + 150
        with limited(card, limit_mb):
            if garbage:
                gc.disable()
                cycle = [torch.empty(100_000_000, dtype=torch.uint8, device=card)]
                cycle.append(cycle)
                del cycle
            try:
                learner.step(batch, 1e-2)
            finally:
                gc.enable()
        weights.append(learner.network.weights.cpu())
    assert torch.equal(*weights)
    assert len([r for r in caplog.records if "no memory is left" in r.getMessage()]) == 1


@pytest.mark.parametrize(("most", "expected"), [(60, 60), (59, 30), (4, 0)])
def test_sequences_are_not_cut(most, expected):
    class Sequences(NamedTuple):
        obs: torch.Tensor
        hidden_state: torch.Tensor

    def gradient(batch):
        assert len(batch.obs) == 5 * len(batch.hidden_state)
        if len(batch.obs) > most:
            raise torch.OutOfMemoryError(FULL)

    batch = Sequences(torch.zeros(125, 3), torch.zeros(25, 8))
    assert _largest_that_fits(torch.device("cpu"), batch, gradient) == expected
