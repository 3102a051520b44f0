"""The learner against torch's own optimiser, and its guarantees for any loss."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from changed import changed
from torch import Tensor, nn

from steadyrl.agents.dqn.build import build_loss_spec
from steadyrl.agents.dqn.loss import td_loss
from steadyrl.agents.dqn.q_heads import ScalarHead
from steadyrl.agents.engine.all_reduce import AllReduceStep
from steadyrl.agents.engine.choice import ENGINES
from steadyrl.agents.engine.eager import EagerStep
from steadyrl.agents.engine.graphs.trace import trace
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.learner.minibatch import Padding
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.buffers.replay.buffer import ReplayBatch
from steadyrl.core import cuda_graph as recording
from steadyrl.core.cuda_graph import CudaGraphed, flatten
from steadyrl.core.errors import MemoryBudgetError, NonFiniteError
from tests.agents.dqn.test_agent import SETTINGS

CPU = torch.device("cpu")


def q_network(seed):
    torch.manual_seed(seed)
    return QNetwork((4,), "float32", 3, (8, 8), True)


def replay_batch(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    return ReplayBatch(
        obs=torch.randn(batch_size, 4, generator=g),
        action=torch.randint(3, (batch_size,), generator=g),
        reward=torch.randn(batch_size, generator=g) * 5,
        discount=torch.rand(batch_size, generator=g),
        next_obs=torch.randn(batch_size, 4, generator=g),
        weight=torch.rand(batch_size, generator=g),
        index=torch.arange(batch_size),
    )


def dqn_learner(mode="direct", **changes):
    settings = changed(SETTINGS, **changes)
    online, target = (FlatNetwork(q_network(seed), CPU) for seed in (0, 1))
    return Learner(build_loss_spec(settings), online, ENGINES[mode](), frozen=(target,))


class Points(NamedTuple):
    """A batch of linear regression."""

    x: Tensor  # [B, 1]
    y: Tensor  # [B]


def squares(network, batch, scale=1.0):
    error = network(batch.x).squeeze(-1) - batch.y
    return PerSampleLoss(scale * error.square(), (error.abs(),), (error.detach(),))


PLAIN = LossSpec(loss=squares, metrics=("train/error",), max_grad_norm=0.0, grad_accumulation=1)


def line(**changes):
    torch.manual_seed(0)
    mode = changes.pop("mode", "direct")
    return Learner(replace(PLAIN, **changes), FlatNetwork(nn.Linear(1, 1), CPU), ENGINES[mode]())


def points(batch_size, seed=0):
    g = torch.Generator().manual_seed(seed)
    return Points(torch.randn(batch_size, 1, generator=g), torch.randn(batch_size, generator=g))


def as_traced(learner):
    """Let the learner run the traced graphs that the compiler would get, uncompiled."""
    step = learner.train_step
    if isinstance(step, EagerStep):
        pytest.skip("STEADYRL_ENGINE=eager: it is about machinery for speed")
    learner.ready = True
    if isinstance(step.run, AllReduceStep):
        step.run.gradient = traced(step.pure_gradient, only_read=(2,))
        step.run.update = traced(step.pure_update)
    else:
        step.run = traced(step.pure, only_read=(3,))
    return learner


def traced(function, only_read=()):
    """Return a function that runs its own graph, traced at the first call."""
    made = []

    def run(*args):
        if not made:
            made.extend(trace(function, args, only_read=only_read))
        graph, captured = made
        return graph(*flatten(args), *captured)

    return run


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [0.3, 0.0])
@pytest.mark.parametrize("graph", [False, True])
def test_dqn_steps_equal_torch_adam_on_clipped_gradients(accumulate, max_norm, graph):
    learner = dqn_learner(
        "compiled" if graph else "direct", grad_accumulation=accumulate, max_grad_norm=max_norm
    )
    if graph:
        as_traced(learner)
    reference, target = q_network(0), q_network(1)
    optimizer = torch.optim.Adam(reference.parameters(), lr=1e-3)
    for i in range(10):
        batch, rate = replay_batch(12, i), 1e-3 / (i + 1)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        batch_size = td_loss(reference, target, batch, head=ScalarHead(huber=True), double=True)
        batch_size.loss.mean().backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm or float("inf"))
        optimizer.step()
        (td_error,) = learner.step(batch, rate)
        torch.testing.assert_close(td_error, batch_size.aux[0], atol=1e-5, rtol=1e-5)
        metrics = dict(zip(learner.means.names, learner.means().values.tolist(), strict=True))
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["train/loss"] == pytest.approx(batch_size.loss.mean().item(), rel=1e-4)
        assert metrics["train/td_error"] == pytest.approx(td_error.abs().mean().item(), rel=1e-4)
    expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(learner.network.weights, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("batch_size", [12, 11, 5])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_microbatches_of_any_size_give_the_batch_gradient(batch_size, count):
    one_batch, split = dqn_learner(), dqn_learner(grad_accumulation=count)
    reports = [learner.step(replay_batch(batch_size, 0), 0.0)[0] for learner in (one_batch, split)]
    torch.testing.assert_close(*reports)
    torch.testing.assert_close(split.network.gradient, one_batch.network.gradient)
    torch.testing.assert_close(split.means().values, one_batch.means().values)


def test_batches_are_preprocessed_before_they_are_split():
    def centred(batch, sample_weight):
        return batch._replace(y=batch.y - torch.dot(batch.y, sample_weight))

    one_batch, split = (line(preprocess_batch=centred, grad_accumulation=count) for count in (1, 3))
    reports = [learner.step(points(7), 0.0)[0] for learner in (one_batch, split)]
    torch.testing.assert_close(*reports)
    torch.testing.assert_close(split.network.gradient, one_batch.network.gradient)


@pytest.mark.parametrize("batch_size", [8, 5, 1])
def test_padded_batches_take_the_same_step(batch_size):
    plain, padded = line(), as_traced(line(mode="compiled", max_batch_size=8))
    for _ in range(3):
        reports = [learner.step(points(batch_size), 1e-2)[0] for learner in (plain, padded)]
        assert len(reports[1]) == 8
        torch.testing.assert_close(reports[1][:batch_size], reports[0])
    torch.testing.assert_close(padded.network.weights, plain.network.weights)
    torch.testing.assert_close(padded.means().values, plain.means().values)


def test_padding_repeats_the_first_sample_with_weight_0():
    batch, sample_weight = Padding(4)(
        Points(torch.tensor([[3.0], [5.0]]), torch.tensor([1.0, 2.0]))
    )
    assert batch.x.squeeze(1).tolist() == [3.0, 5.0, 3.0, 3.0]
    assert sample_weight.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_batches_built_in_the_scratch_buffer_are_padded_like_copies():
    padding, copying = Padding(5), Padding(5)
    for batch_size in (5, 3, 5, 2):
        batch = points(batch_size)
        buffer_ = padding.scratch(batch, batch_size)
        for to, part in zip(buffer_, batch, strict=True):
            to.copy_(part)
        for mine, other in zip(padding(buffer_), copying(batch), strict=True):
            parts = (mine, other) if isinstance(mine, tuple) else ((mine,), (other,))
            assert all(torch.equal(a, b) for a, b in zip(*parts, strict=True))


@pytest.mark.parametrize("graph", [False, True])
def test_loss_scalars_may_change_with_every_step(graph):
    learner = as_traced(line(mode="compiled")) if graph else line()
    norms = []
    for scale in (1.0, 2.0, 5.0):
        learner.step(points(6), 0.0, scale)
        norms.append(learner.means().values[-1].item())
    assert norms == pytest.approx([norms[0], 2 * norms[0], 5 * norms[0]])


@pytest.mark.parametrize("graph", [False, True])
def test_a_step_that_exceeds_the_limit_is_undone(graph):
    measured = line(watched="train/error", limit=1e3)
    measured.step(points(6), 1e-2)
    just_below = math.nextafter(measured.watched, 0.0)  # the same number in float32
    for limit, undone in ((1e-3, True), (just_below, True), (measured.watched, False)):
        mode = "compiled" if graph else "direct"
        learner = line(mode=mode, watched="train/error", limit=limit)
        if graph:
            as_traced(learner)
        before = learner.state_dict()
        learner.step(points(6), 1e-2)
        after = learner.state_dict()
        assert learner.limit_exceeded is undone
        assert learner.updates == (not undone)
        assert (learner.means() is None) is undone, "nor does it count in a mean"
        assert torch.equal(before["network"]["weights"], after["network"]["weights"]) is undone
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert (
                torch.equal(before["optimizer_state"][name], after["optimizer_state"][name])
                is undone
            )
    assert not line().limit_exceeded


def test_metric_means_cover_the_steps_since_the_last_call():
    learner = line()
    assert learner.means() is None
    singles = []
    for seed in (1, 2):
        learner.step(points(4, seed), 0.0)
        singles.append(learner.means().values)
    for seed in (1, 2):
        learner.step(points(4, seed), 0.0)
    both = learner.means()
    assert both.names == ("train/loss", "train/error", "train/grad_norm", "train/loss_max")
    torch.testing.assert_close(both.values[:-1], (singles[0] + singles[1])[:-1] / 2)
    assert both.values[-1] == max(singles[0][0], singles[1][0])
    assert learner.means() is None
    assert learner.updates == 4


def test_metrics_survive_graphs_that_reuse_their_output():
    learner, static, calls = line(mode="cudagraph"), torch.zeros(3), []

    def replayed(*args):
        calls.append(None)
        return static.fill_(10 ** len(calls)), torch.zeros(4)

    learner.train_step.run = replayed
    for _ in range(3):
        learner.step(points(4), 0.0)
    assert learner.means().values.tolist() == [370.0] * 3 + [1000.0]  # of 10, 100 and 1,000


def test_returned_means_do_not_change():
    learner = line()
    learner.step(points(4), 0.0)
    means = learner.means().values
    before = means.clone()
    for seed in (1, 2):
        learner.step(points(4, seed), 0.0)
    assert torch.equal(means, before)


def test_metric_sums_are_restored():
    one_batch, first, second = line(), line(), line()
    for seed in (1, 2, 3):
        one_batch.step(points(4, seed), 1e-2)
    for seed in (1, 2):
        first.step(points(4, seed), 1e-2)
    second.load_state_dict(first.state_dict())
    second.step(points(4, 3), 1e-2)
    assert torch.equal(second.means().values, one_batch.means().values)


def test_a_nan_loss_raises_immediately():
    learner = line()
    learner.step(points(4), 0.0)
    with pytest.raises(NonFiniteError, match="train/loss is not finite at update 2"):
        learner.step(points(4)._replace(y=torch.full((4,), torch.inf)), 0.0)


@pytest.mark.parametrize("graph", [False, True])
def test_resuming_is_bitwise_exact(graph):
    def fresh():
        learner = dqn_learner("compiled" if graph else "direct")
        return as_traced(learner) if graph else learner

    straight = fresh()
    for i in range(3):
        straight.step(replay_batch(8, i), 1e-3)
    resumed = fresh()
    resumed.load_state_dict(straight.state_dict())
    for learner in (straight, resumed):
        learner.step(replay_batch(8, 9), 1e-3)
    assert torch.equal(straight.network.weights, resumed.network.weights)
    assert straight.updates == resumed.updates == 4


class NoCapture:
    """A driver that refuses to capture."""

    default_capture_stream = None

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    def __exit__(self, *args):
        return False

    def reset(self):
        pass


@pytest.fixture
def driver(monkeypatch):
    """Replace CUDA; cleanup after failed captures is tested in tests/core."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoCapture)
    monkeypatch.setattr(torch.cuda, "graph", NoCapture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *means: nullcontext())
    monkeypatch.setattr(NoCapture, "default_capture_stream", None)
    monkeypatch.setattr(recording, "_release", lambda pool: None)
    monkeypatch.setattr(CudaGraphed, "WARM_UP", 0)


def test_failed_captures_fall_back_to_eager_with_one_warning(driver, caplog):
    direct, refused = line(), line(mode="cudagraph")
    for i in range(3):
        for learner in (direct, refused):
            learner.step(points(4, i), 1e-2)
    assert torch.equal(direct.network.weights, refused.network.weights)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "as a CUDA graph, running eagerly: RuntimeError: operation not" in warnings[0]


def test_out_of_memory_during_capture_ends_the_run(driver, monkeypatch):
    class Full(NoCapture):
        def __enter__(self):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", Full)
    learner = line(mode="cudagraph")
    with pytest.raises(MemoryBudgetError, match="an update of 4 samples does not fit") as caught:
        for i in range(CudaGraphed.WARM_UP + 1):
            learner.step(points(4, i), 1e-2)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert learner.updates == CudaGraphed.WARM_UP
