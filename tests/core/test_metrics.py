import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steadyrl.core.errors import NonFiniteError
from steadyrl.core.metrics import MetricAccumulator, MetricMeans, Metrics, record


class CountTransfers(TorchDispatchMode):
    """Count scalars read to the host, and tensors created."""

    def __init__(self):
        super().__init__()
        self.reads = 0
        self.created = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.reads += name == "_local_scalar_dense"
        self.created += name in ("zeros_like", "empty_like", "clone", "add", "_to_copy")
        return func(*args, **(kwargs or {}))


def loss_with_graph():
    weight = torch.ones(3, requires_grad=True)
    return (weight * 2).sum()


def test_metrics_are_detached_from_the_graph():
    loss = loss_with_graph()
    recorded = record(["loss", "count"], loss, torch.tensor(3))
    built = Metrics(("loss",), loss.reshape(1))
    for metrics in (recorded, built):
        assert metrics.values.grad_fn is None and not metrics.values.requires_grad
    assert recorded.values.tolist() == [6.0, 3.0]
    with pytest.raises(AttributeError):
        recorded.values = loss


def test_numbers_are_metrics_too():
    recorded = record(["a", "b", "c", "d"], 1.0, np.float32(2.5), 3, torch.tensor(4))
    assert recorded.values.tolist() == [1.0, 2.5, 3.0, 4.0]
    assert recorded.values.dtype == torch.float32
    there = record(["a", "b"], 1, torch.zeros((), device="meta"))
    assert there.values.device.type == "meta"  # of the tensors among them
    assert record(["a"], 7).values.tolist() == [7.0]


def test_the_accumulator_keeps_no_graph_alive():
    accumulator = MetricAccumulator()
    weight = torch.ones(3, requires_grad=True)
    product = weight * 2
    alive = weakref.ref(product)
    accumulator.add(record(["loss"], product.sum()))
    del product
    gc.collect()
    assert alive() is None
    assert accumulator.flush() == {"loss": 6.0}


def test_a_wrong_number_of_names_is_rejected():
    with pytest.raises(ValueError, match="2 metric names"):
        Metrics(("a", "b"), torch.zeros(3))


def test_flush_returns_means_and_starts_a_new_interval():
    accumulator = MetricAccumulator()
    for value in range(5):
        accumulator.add(record(["x", "y"], torch.tensor(float(value)), torch.tensor(1.0)))
    assert accumulator.flush() == {"x": 2.0, "y": 1.0}
    assert accumulator.flush() == {}
    accumulator.add(record(["x", "y"], torch.tensor(7.0), torch.tensor(1.0)))
    assert accumulator.flush() == {"x": 7.0, "y": 1.0}


def test_different_metric_sets_share_an_interval():
    accumulator = MetricAccumulator()
    accumulator.add(record(["a", "b"], torch.tensor(1.0), torch.tensor(10.0)))
    accumulator.add(record(["b", "c"], torch.tensor(20.0), torch.tensor(5.0)))
    accumulator.add(record(["b", "c"], torch.tensor(30.0), torch.tensor(7.0)))
    assert accumulator.flush() == {"a": 1.0, "b": 20.0, "c": 6.0}


def test_flush_forgets_metric_sets_that_stopped():
    accumulator = MetricAccumulator()
    for number in range(10_000):
        accumulator.add(Metrics((f"name{number}",), torch.zeros(1)))
        if number % 100 == 99:
            assert len(accumulator.flush()) == 100
    accumulator.flush()
    assert len(accumulator._sums) == 0


def test_adding_accumulates_in_place_without_allocating():
    accumulator = MetricAccumulator()
    metrics = record(["x"], torch.tensor(1.0))
    accumulator.add(metrics)
    pointer = accumulator._sums[("x",)].total.data_ptr()
    with CountTransfers() as count:
        for _ in range(100):
            accumulator.add(metrics)
    assert count.created == count.reads == 0
    accumulator.flush()
    accumulator.add(metrics)
    assert accumulator._sums[("x",)].total.data_ptr() == pointer


def test_flush_reads_from_the_device_once(monkeypatch):
    accumulator = MetricAccumulator()
    reads = []
    for name in ("tolist", "item", "cpu", "numpy", "__float__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _original=original, _name=name):
            reads.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    for _ in range(50):
        accumulator.add(record(["a", "b"], torch.tensor(1.0), torch.tensor(2.0)))
        accumulator.add(record(["c"], torch.tensor(3.0)))
    assert reads == []
    assert accumulator.flush() == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert reads == ["tolist"]


def test_bfloat16_metrics_accumulate_exactly():
    accumulator = MetricAccumulator()
    for _ in range(5000):
        accumulator.add(Metrics(("x",), torch.ones(1, dtype=torch.bfloat16)))
    assert accumulator.flush() == {"x": 1.0}


def test_flush_can_reject_non_finite_means_by_name():
    accumulator = MetricAccumulator()
    bad = record(["train/q_mean", "train/loss"], torch.tensor(1.0), torch.tensor(math.nan))
    accumulator.add(bad)
    with pytest.raises(NonFiniteError, match=r"train/loss is nan at step 1,234"):
        accumulator.flush(check_step=1234)
    accumulator.add(bad)
    assert math.isnan(accumulator.flush()["train/loss"])


def test_of_names_that_end_with_max_the_largest_counts():
    accumulator = MetricAccumulator()
    for value in (1.0, 9.0, 2.0):
        accumulator.add(record(["x", "x_max"], value, value))
    accumulator.add(record(["x_max", "y"], 5.0, 1.0))
    assert accumulator.flush() == {"x": 4.0, "x_max": 9.0, "y": 1.0}
    accumulator.add(record(["x", "x_max"], -2.0, -2.0))  # nothing is left of the interval before
    assert accumulator.flush() == {"x": -2.0, "x_max": -2.0}


def test_the_largest_survives_a_checkpoint():
    first, second = MetricAccumulator(), MetricAccumulator()
    for value in (0.1, 0.7, 0.3):
        first.add(record(["x_max"], value))
    second.load_state_dict(first.state_dict())
    for accumulator in (first, second):
        accumulator.add(record(["x_max"], 0.2))
    assert second.flush() == first.flush() == {"x_max": pytest.approx(0.7)}


def test_means_of_steps_have_the_largest_loss():
    means = MetricMeans(("loss", "other", "loss_max"), torch.device("cpu"))
    for loss in (3.0, -1.0, 7.0, 2.0):
        assert means.add(torch.tensor([loss, 1.0]))
    found = means()
    assert found.names == ("loss", "other", "loss_max")
    assert found.values.tolist() == [2.75, 1.0, 7.0]
    assert means.add(torch.tensor([-5.0, 2.0]))
    assert means().values.tolist() == [-5.0, 2.0, -5.0]


def test_metrics_weigh_as_many_updates_as_they_are_means_of():
    """Calls of 1, 4 and 8 steps: the mean is over the 13 steps; others count once a call."""
    means = MetricMeans(("loss", "loss_max"), torch.device("cpu"))
    accumulator, losses, others = MetricAccumulator(), [], [0.5, -2.0, 3.0]
    for steps, other in zip((1, 4, 8), others, strict=True):
        for step in range(steps):
            losses.append(2.0 ** (len(losses) - step))
            assert means.add(torch.tensor([losses[-1]]))
        accumulator.add(means({"other": torch.tensor(other)}))
    found = accumulator.flush()
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert found["loss_max"] == max(losses)
    assert found["other"] == pytest.approx(0.5)
    accumulator.add(means({"other": torch.tensor(7.0)}))  # a call without steps
    assert accumulator.flush() == {"other": 7.0}


def test_counts_outlast_a_checkpoint():
    first, second = MetricAccumulator(), MetricAccumulator()
    for value, count in ((1.0, 3), (5.0, 1)):
        first.add(Metrics(("x", "x_max", "y"), torch.full((3,), value), (count, count, 1)))
    second.load_state_dict(first.state_dict())
    assert second.flush() == first.flush() == {"x": 2.0, "x_max": 5.0, "y": 3.0}


def test_a_wrong_number_of_counts_is_rejected():
    with pytest.raises(ValueError, match="2 metric names but 1 counts"):
        Metrics(("a", "b"), torch.zeros(2), (1,))


def test_a_largest_that_is_not_finite_is_an_error_of_its_step():
    means = MetricMeans(("loss", "loss_max"), torch.device("cpu"))
    assert means.add(torch.tensor([1.0]))
    assert not means.add(torch.tensor([math.nan]))
    assert not means.add(torch.tensor([math.inf]))


def test_a_restored_accumulator_continues_its_interval():
    uninterrupted, first = MetricAccumulator(), MetricAccumulator()
    for value in (1.0, 2.0, 0.1):
        for accumulator in (uninterrupted, first):
            accumulator.add(record(["a", "b"], torch.tensor(value), torch.tensor(-value)))
    state = first.state_dict()
    first.add(record(["a", "b"], torch.tensor(9.0), torch.tensor(9.0)))  # after the state was taken
    second = MetricAccumulator()
    second.load_state_dict(state)
    for accumulator in (uninterrupted, second):
        accumulator.add(record(["a", "b"], torch.tensor(3.0), torch.tensor(5.0)))
        accumulator.add(record(["c"], torch.tensor(7.0)))
    assert second.flush() == uninterrupted.flush()


def test_all_sums_of_a_checkpoint_move_to_the_device():
    """Also those whose names do not come again in the interval."""
    before = MetricAccumulator()
    for names in (("a",), ("a", "b")):
        before.add(Metrics(names, torch.ones(len(names))))
    for again in (("a", "b"), ("c",)):
        restored = MetricAccumulator()
        restored.load_state_dict(before.state_dict())
        restored.add(Metrics(again, torch.ones(len(again), device="meta")))
        assert {each.total.device.type for each in restored._sums.values()} == {"meta"}


@pytest.mark.gpu
def test_sums_stay_on_the_device():
    accumulator = MetricAccumulator()
    with torch.cuda.device(0):
        value = torch.tensor(2.0, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                accumulator.add(record(["x"], value))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert accumulator.flush() == {"x": 2.0}
