"""Every optimiser on several ranks equals one process with all of their samples, in every mode."""

import numpy as np
import pytest
import tape
import torch
from forked_ranks import together

from steadyrl.agents.engine import direct
from steadyrl.agents.engine.cuda_graph import CudaGraphEngine
from steadyrl.agents.engine.direct import DirectEngine
from steadyrl.agents.engine.eager import EagerEngine
from steadyrl.agents.engine.inductor import InductorEngine
from steadyrl.core import cuda_graph as capturing
from tests.agents.learner.optimizers.test_optimizers import NAMES, STEPS, learner
from tests.agents.learner.test_learner import as_traced, replay_batch

CHANGES = {"optimizer__weight_decay": 0.1, "max_grad_norm": 0.5}
SAMPLES = 12


def of_rank(comm, engine, name):
    """Return a rank's learner, whose graphs are emulated."""
    made = learner(engine(), name, **CHANGES)
    made.attach_comm(comm)
    return as_traced(made) if engine is InductorEngine else made


def learn(comm, made, steps):
    """Step on this rank's samples of the batches; rank 0 has two thirds of them."""
    begin, end = ((0, 8), (8, SAMPLES))[comm.rank]
    made.sample_weight = 1 / SAMPLES
    for i in steps:
        batch = replay_batch(SAMPLES, i)
        made.step(type(batch)(*(part[begin:end] for part in batch)), 1e-3 / (1 + i % 4))
    return [part.numpy().copy() for part in (made.network.weights.detach(), *made.optimizer_state)]


def resumed(comm, engine, name):
    """Return what a rank has learned, and what it has if it is resumed before the last steps."""
    straight, other = of_rank(comm, engine, name), of_rank(comm, engine, name)
    learn(comm, straight, range(STEPS - 8))
    other.load_state_dict(straight.state_dict())
    found = [learn(comm, made, range(STEPS - 8, STEPS)) for made in (straight, other)]
    for made in (straight, other) if engine is CudaGraphEngine else ():
        assert made.train_step.run.gradient._replay and made.train_step.run.update._replay
    return found


@pytest.fixture
def captures(monkeypatch):
    """Capture CUDA graphs on the host, which counts as costly to synchronise."""
    monkeypatch.setattr(capturing, "capture", tape.record)
    monkeypatch.setattr(capturing, "on_side_stream", lambda function: function())
    monkeypatch.setattr(direct, "host_sees", lambda _: False)


@pytest.mark.parametrize(
    "engine",
    [
        EagerEngine,
        DirectEngine,
        pytest.param(InductorEngine, marks=pytest.mark.machinery),
        pytest.param(CudaGraphEngine, marks=pytest.mark.machinery),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_take_the_steps_of_one_process_also_resumed(name, engine, request):
    one = learner(EagerEngine(), name, **CHANGES)
    for i in range(STEPS):
        one.step(replay_batch(SAMPLES, i), 1e-3 / (1 + i % 4))
    if engine is CudaGraphEngine:
        request.getfixturevalue("captures")
    ranks = together(2, resumed, engine, name)
    first = ranks[0][0]
    for found in ranks[0][1], *ranks[1]:
        assert all(map(np.array_equal, found, first))
    for found, expected in zip(first, (one.network.weights, *one.optimizer_state), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-4)
