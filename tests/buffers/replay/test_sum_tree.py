"""Prioritised sampling on host and device: frequencies, weights, rounding, invalid input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.buffers.replay import block_sums
from steadyrl.buffers.replay.block_sums import BlockSums, first_beyond
from steadyrl.buffers.replay.sum_tree import (
    EPSILON,
    SumTree,
    draw_stratified,
    root_sums,
    set_leaves,
)
from steadyrl.core.errors import NonFiniteError

CPU = torch.device("cpu")
NONE = np.empty(0, np.int64)


class Tree:
    """One interface for both implementations."""

    def __init__(self, kind: str, slots: int, alpha: float = 1.0) -> None:
        self.kind = kind
        self.host = kind == "host"
        self.part = SumTree(slots, alpha) if self.host else BlockSums(slots, alpha, CPU)

    def add_and_evict(self, added=NONE, evicted=NONE) -> None:
        added, evicted = np.asarray(added, np.int64), np.asarray(evicted, np.int64)
        if self.host:
            set_leaves(*self.part.levels, self.part.initial_priority, added, evicted)
        else:
            self.part.add_and_evict(torch.from_numpy(added), torch.from_numpy(evicted))

    def draw(self, uniform, beta: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        uniform = np.array(uniform, np.float64)
        if not self.host:
            index, weight = self.part.draw(torch.from_numpy(self.part.draw_inputs(uniform, beta)))
            return index.numpy(), weight.numpy()
        index, weight = np.empty(len(uniform), np.int64), np.empty(len(uniform), np.float32)
        draw_stratified(*self.part.levels, uniform, beta, uniform, index, weight)
        return index, weight

    def update(self, index, error) -> None:
        index, error = np.asarray(index, np.int64), np.asarray(error, np.float64)
        if self.host:
            self.part.update(index, error)
        else:
            self.part.update(torch.from_numpy(index), torch.from_numpy(error))

    def set(self, index, priority) -> None:
        """Set the priority exactly, up to rounding (α = 1)."""
        self.update(index, np.asarray(priority) - EPSILON)

    def root(self) -> tuple[float, float]:
        """Return the sum of the priorities and the smallest one (infinite when empty)."""
        part = self.part
        if self.host:
            return root_sums(*part.levels)
        return part._sums.sum().item(), part._minima.amin().item()

    def leaves(self) -> np.ndarray:
        return np.asarray(self.part.state_dict(self.part.slots)["leaves"])


@pytest.fixture(params=["host", "device"])
def kind(request) -> str:
    return request.param


def test_sampling_frequencies_follow_the_priorities(kind):
    random = np.random.default_rng(7)
    slots, alpha = 37, 0.6
    tree = Tree(kind, slots, alpha)
    sampleable = np.flatnonzero(np.arange(slots) % 4 != 1)
    tree.add_and_evict(added=sampleable)
    error = random.exponential(size=len(sampleable)) + 0.05
    tree.update(sampleable, error)
    counts = np.zeros(slots)
    draws, batch = 4000, 25
    for _ in range(draws):
        index, _ = tree.draw(random.random(batch))
        counts += np.bincount(index, minlength=slots)
    assert counts[1::4].sum() == 0
    expected = (error + EPSILON) ** alpha
    expected *= draws * batch / expected.sum()
    statistic = ((counts[sampleable] - expected) ** 2 / expected).sum()
    freedom = len(sampleable) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5  # mean and five standard deviations


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 700))
def test_host_and_device_trees_are_equal_and_sample_the_same(seed, slots):
    random = np.random.default_rng(seed)
    trees = [Tree("host", slots, 0.7), Tree("device", slots, 0.7)]
    sampleable: set[int] = set()
    for _ in range(6):
        added = random.permutation(slots)[: random.integers(1, slots + 1)]
        evicted = random.permutation(slots)[: random.integers(0, slots)]
        index = random.permutation(slots)[: random.integers(1, slots + 1)]
        error = random.normal(size=len(index)) * 10.0 ** random.integers(-4, 5)
        uniform = random.random(16)
        sampleable = (sampleable | set(added.tolist())) - set(evicted.tolist())
        for tree in trees:
            tree.add_and_evict(added, evicted)
            tree.update(index, error)
            assert set(np.flatnonzero(tree.leaves()).tolist()) == sampleable
        host, device = trees
        np.testing.assert_allclose(host.leaves(), device.leaves(), rtol=1e-14)
        np.testing.assert_allclose(host.root(), device.root(), rtol=1e-13)
        if not sampleable:
            continue
        ours, theirs = host.draw(uniform, 0.5), device.draw(uniform, 0.5)
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6)
        assert set(ours[0].tolist()) <= sampleable


def test_sampling_is_stratified(kind):
    tree = Tree(kind, 100)
    tree.add_and_evict(added=np.arange(100))  # equal: stratum b of 10 is ids 10 b … 10 b + 9
    index, _ = tree.draw(np.random.default_rng(0).random(10))
    assert (index // 10).tolist() == list(range(10))


def test_importance_weights_in_closed_form(kind):
    tree = Tree(kind, 4)
    tree.add_and_evict(added=range(4))
    tree.set(range(4), [1.0, 2.0, 3.0, 4.0])
    # P = p / 10; w_i = (4 P_i)^-β, divided by the largest, which belongs to p = 1.
    uniform = [0.9, 0.9, 0.9, 0.9]  # targets 2.25, 4.75, 7.25, 9.75 of the sum 10
    index, weight = tree.draw(uniform, 0.5)
    assert index.tolist() == [1, 2, 3, 3]
    priority = np.array([2.0, 3.0, 4.0, 4.0])
    plain = (4 * priority / 10) ** -0.5
    np.testing.assert_allclose(weight, plain / (4 * 1.0 / 10) ** -0.5, rtol=1e-6)
    np.testing.assert_allclose(tree.draw(uniform, 1.0)[1], 1.0 / priority, rtol=1e-6)
    assert tree.draw(uniform, 0.0)[1].tolist() == [1.0] * 4


def test_the_minimum_rises_when_it_is_updated_or_evicted(kind):
    tree = Tree(kind, 50)
    tree.add_and_evict(added=range(50))
    tree.set(range(50), np.arange(1, 51))
    assert tree.root()[1] == pytest.approx(1.0)
    tree.set([0], [100.0])
    assert tree.root()[1] == pytest.approx(2.0)
    tree.add_and_evict(evicted=[1])
    assert tree.root()[1] == pytest.approx(3.0)
    tree.add_and_evict(evicted=range(50))
    assert tree.root() == (0.0, math.inf)


def test_new_transitions_get_the_largest_priority_seen(kind):
    tree = Tree(kind, 8, alpha=0.5)
    tree.add_and_evict(added=[0])
    assert tree.leaves()[0] == 1.0
    tree.update([0], [-16.0])
    tree.update([0], [0.5])
    tree.add_and_evict(added=[1])
    assert tree.leaves()[1] == pytest.approx((16 + EPSILON) ** 0.5)


def test_late_updates_do_not_revive_evicted_transitions(kind):
    tree = Tree(kind, 8)
    tree.add_and_evict(added=[0, 1])
    tree.add_and_evict(evicted=[0])
    tree.update([0, 1], [5.0, 7.0])
    assert np.flatnonzero(tree.leaves()).tolist() == [1]


@pytest.mark.parametrize("slots", [1, 7, 8, 9, 63, 65, 513, 1000])
def test_evicted_leaves_are_never_sampled_despite_rounding(kind, slots):
    random = np.random.default_rng(slots)
    top = math.nextafter(1.0, 0.0)
    for _ in range(20):
        tree = Tree(kind, slots)
        sampleable = np.flatnonzero(random.random(slots) < 0.3)
        if not len(sampleable):
            sampleable = np.array([slots // 2])
        tree.add_and_evict(added=sampleable)
        # Sums of numbers this far apart are rounded at every level.
        tree.set(sampleable, 10.0 ** random.uniform(-5, 12, len(sampleable)))
        for uniform in ([0.0], [top], [top] * 64, [0.0] * 64):
            index, weight = tree.draw(uniform)
            assert np.isin(index, sampleable).all()
            assert ((weight > 0) & (weight <= 1)).all()


def test_a_target_beyond_the_sum_selects_the_last_nonzero_leaf():
    values = torch.tensor([0.0, 2.0, 1.0, 0.0])
    sums = values.cumsum(0)
    target = torch.tensor([0.0, 1.9, 2.0, 3.0, 9.0])
    assert first_beyond(sums, values, target).tolist() == [1, 1, 2, 2, 2]
    scrambled = torch.tensor([0.1, 2.0, 3.0, 3.1])  # what a parallel scan may round to
    assert first_beyond(scrambled, values, torch.tensor([0.05, 3.05])).tolist() == [1, 2]


def test_the_root_equals_the_sum_after_a_million_updates():
    random = np.random.default_rng(0)
    slots = 5000
    tree = Tree("host", slots, 0.6)
    tree.add_and_evict(added=np.arange(slots))
    for _ in range(1000):
        scale = 10.0 ** random.integers(-6, 7)
        tree.update(random.integers(0, slots, 1000), random.normal(size=1000) * scale)
    total, smallest = tree.root()
    leaves = tree.leaves()
    assert total == pytest.approx(math.fsum(leaves), rel=1e-12)
    assert smallest == leaves.min()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_non_finite_td_errors_are_rejected_with_their_index(kind, wrong):
    tree = Tree(kind, 8)
    tree.add_and_evict(added=range(8))
    before = tree.leaves().copy()
    with pytest.raises(NonFiniteError, match=r"td_error\[1\]=-?(nan|inf) for transition 6"):
        tree.update([2, 6, 7], [1.0, wrong, 3.0])
    np.testing.assert_array_equal(tree.leaves(), before)


def test_wrong_shapes_and_ids_are_rejected(kind):
    tree = Tree(kind, 8)
    tree.add_and_evict(added=range(8))
    with pytest.raises(ValueError, match="must both be"):
        tree.update([1, 2], [[0.5], [0.5]])
    for wrong in (-1, 8):
        with pytest.raises(IndexError, match=rf"index\[0\]={wrong}"):
            tree.update([wrong], [0.5])


def test_a_saved_tree_continues_the_same(kind):
    random = np.random.default_rng(1)
    tree, other = Tree(kind, 300, 0.6), Tree(kind, 300, 0.6)
    tree.add_and_evict(added=np.arange(0, 250))
    tree.update(np.arange(250), random.normal(size=250))
    other.part.load_state_dict(tree.part.state_dict(250))
    tree.add_and_evict(added=[290], evicted=[3])
    other.add_and_evict(added=[290], evicted=[3])
    uniform = random.random(32)
    np.testing.assert_array_equal(tree.draw(uniform)[0], other.draw(uniform)[0])
    assert tree.root() == other.root()


def test_bytes_needed_equals_the_allocated_bytes(kind):
    for slots in (1, 8, 9, 1000, 4097):
        tree = Tree(kind, slots)
        assert tree.part.nbytes == type(tree.part).bytes_needed(slots)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 8), (2, 1000)])
def test_deterministic_running_sums_equal_cumsum(shape, monkeypatch):
    values = torch.rand(shape, dtype=torch.float64)
    monkeypatch.setattr(block_sums, "host_sees", lambda _: False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    before = values.clone()
    torch.testing.assert_close(block_sums.running_sums(values), values.cumsum(-1))
    assert torch.equal(values, before)
