"""Peaks of a card: every reader has its own, though torch keeps one."""

import pytest
import torch

from steadyrl.memory.gpu.peak import open_peak
from steadyrl.memory.memory_scope import MemoryScope
from steadyrl.memory.watch import MemoryWatch

MB = 1_000_000
CARD = torch.device("cuda", 3)


class Allocator:
    """torch's counts of one card: allocated now, and one peak for everybody."""

    def __init__(self, monkeypatch):
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda card: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda card: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, card):
        self.peak = self.now

    def borrow(self, nbytes):
        self.peak = max(self.peak, self.now + nbytes)


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


def test_a_reader_keeps_the_peak_that_another_one_has_taken(allocator):
    allocator.now = 5
    allocator.borrow(100)
    first, second = open_peak(CARD), open_peak(CARD)
    assert first.read() == second.read() == 5  # earlier peaks are not theirs
    allocator.borrow(20)
    assert second.pop() == 25
    allocator.borrow(10)
    assert (first.read(), second.read()) == (25, 15)
    allocator.now = 7
    assert first.pop() == 25 and first.read() == 7
    third = open_peak(CARD)
    allocator.borrow(1)
    assert [each.read() for each in (first, second, third)] == [8, 15, 8]


@pytest.mark.gpu
def test_nested_scopes_do_not_take_the_update_s_peak_from_the_monitor(alert_settings):
    device = torch.device("cuda", 0)
    watch = MemoryWatch(alert_settings, device)
    watch.measure(0)
    held = torch.zeros(10 * MB, dtype=torch.uint8, device=device)
    with MemoryScope("outer", device=device) as outer:
        torch.zeros(80 * MB, dtype=torch.uint8, device=device)
        with MemoryScope("inner", device=device) as inner:
            torch.zeros(20 * MB, dtype=torch.uint8, device=device)
    scalars = watch.measure(1)
    watch.close()
    assert inner.report.device.taken == pytest.approx(20 * MB, rel=0.2)
    assert outer.report.device.taken == pytest.approx(80 * MB, rel=0.2)
    assert outer.report.timer.seconds() >= inner.report.timer.seconds() > 0
    assert scalars["memory/cuda_peak_mb"] - scalars["memory/cuda_allocated_mb"] > 70
    assert held.numel() == 10 * MB
