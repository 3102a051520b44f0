import logging
from dataclasses import replace

import pytest
import torch
from pages import fresh_pages

from steadyrl.memory.memory_scope import MemoryScope, MemoryUse, ScopeReport, ScopeTable
from steadyrl.memory.process import read_peak, read_rss

MB = 1_000_000


def test_a_scope_reports_kept_and_peak_memory(process):
    reports, kept = [], []
    with MemoryScope("keep", report=reports.append) as scope:
        kept.append(fresh_pages(40 * MB))
    with MemoryScope("borrow", report=reports.append):
        del kept[:]
        # More than the process' peak so far: peaks below it are not measured.
        fresh_pages(read_peak() - read_rss(process) + 150 * MB)
    assert scope.report is reports[0] and reports[0].name == "keep"
    assert 36 * MB < reports[0].host.kept <= reports[0].host.taken
    assert reports[1].host.kept < -30 * MB
    assert reports[1].host.taken > 80 * MB
    assert reports[0].device == MemoryUse(0, 0, 0)


def test_a_decorated_function_is_measured_at_every_call():
    reports = []

    @MemoryScope("sum", report=reports.append)
    def total(n):
        """Sum."""
        return n + total(n - 1) if n else 0

    assert total(3) == 6 and total.__name__ == "total" and total.__doc__ == "Sum."
    assert [r.name for r in reports] == ["sum"] * 4
    assert reports[-1].seconds >= reports[0].seconds >= 0


def test_a_failing_block_is_reported_and_raises():
    reports = []
    with pytest.raises(KeyError), MemoryScope("fail", report=reports.append):
        raise KeyError
    assert len(reports) == 1


def test_by_default_a_scope_writes_to_the_log(caplog):
    with caplog.at_level(logging.INFO, "steadyrl"), MemoryScope("update"):
        pass
    (line,) = caplog.messages
    assert line.startswith("update: host took ")


def test_used_is_known_inside_a_block():
    with MemoryScope("keep") as scope:
        kept = fresh_pages(40 * MB)
        host, device = scope.used()
    assert 36 * MB < host < 60 * MB and device == 0
    assert len(kept)


def test_tensors_and_objects_that_grew_are_named(caplog):
    held, log = Held(), logging.getLogger("steadyrl")
    with caplog.at_level(logging.INFO, log.name), MemoryScope("fill", objects=True) as scope:
        held.tensors += [torch.zeros(3, 7) for _ in range(50)]
        temporary = [torch.zeros(3, 8) for _ in range(50)]
        del temporary
    text = "; ".join(scope.report.growth)
    assert "Held.tensors: list with 50 more elements (Tensor)" in text
    assert "50 more tensors float32[3, 7] on cpu" in text and "[3, 8]" not in text
    assert [line for line in caplog.messages if "Held.tensors" in line] == [
        f"fill: {line}" for line in scope.report.growth if "Held.tensors" in line
    ]
    with MemoryScope("nothing") as plain:
        held.tensors += [torch.zeros(3, 7) for _ in range(50)]
    assert plain.report.growth == ()


def test_a_decorated_function_names_what_grew_too():
    held, reports = Held(), []

    @MemoryScope("fill", objects=True, report=reports.append)
    def fill():
        held.tensors += [torch.zeros(5, 7) for _ in range(50)]

    fill()
    assert any("Held.tensors" in line for line in reports[0].growth)


class Held:
    """Holds tensors."""

    def __init__(self):
        self.tensors = []


def test_a_table_sums_its_scopes_since_the_start(settings, clock):
    table = ScopeTable(replace(settings, step_times=5, collect_times=2), clock=clock)
    held = []

    class Learner:
        def sample(self, size):
            held.append(fresh_pages(size))
            return size

        def update(self):
            return self.sample(size=40 * MB)

    learner, other = Learner(), Learner()
    for name in ("update", "sample"):
        scope = MemoryScope(name, report=table.add)
        setattr(learner, name, scope(getattr(learner, name)))
    assert [learner.update() for _ in range(3)] == [40 * MB] * 3
    other.sample(MB)  # another object, which is not wrapped
    with MemoryScope("collect", report=table.add):
        pass
    clock.now += 100
    title, _, *rows, graphs, none = table.text("steps 0 to 10").splitlines()
    assert (graphs, none) == ("tensors that keep their graph:", "  none")
    assert "steps 0 to 10" in title
    cells = {row.split()[0]: row.split() for row in rows}
    assert set(cells) == {"update", "sample", "collect"}
    assert cells["update"][1] == cells["sample"][1] == "3" and cells["collect"][1] == "1"
    assert 110 < float(cells["sample"][5]) < 130
    assert 37 < float(cells["sample"][4]) < 45
    reports = [ScopeReport("update", 0.25, MemoryUse(0, 0, 0), MemoryUse(0, 0, 0))] * 2
    fresh = ScopeTable(settings, clock=clock)
    clock.now += 2
    for report in reports:
        fresh.add(report)
    assert fresh.text("first").splitlines()[2].split()[:4] == ["update", "2", "25.0%", "250.000"]
    clock.now += 2
    fresh.add(reports[0])  # totals go on
    assert fresh.text("second").splitlines()[2].split()[:3] == ["update", "3", "18.8%"]


@pytest.mark.gpu
def test_nested_scopes_measure_separate_device_peaks():
    device = torch.device("cuda", 0)
    with MemoryScope("outer", device=device) as outer:
        first = torch.zeros(80 * MB, dtype=torch.uint8, device=device)
        del first
        with MemoryScope("inner", device=device) as inner:
            second = torch.zeros(20 * MB, dtype=torch.uint8, device=device)
    assert inner.report.device.taken == pytest.approx(20 * MB, rel=0.2)
    assert inner.report.device.kept == pytest.approx(20 * MB, rel=0.2)
    assert outer.report.device.taken == pytest.approx(80 * MB, rel=0.2)
    assert second.numel() == 20 * MB
