import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pages import mapped_by

import steadyrl.memory.budget as budget
from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.bounds import Bound, Bounds
from steadyrl.memory.limit.meters import Level, OwnMeter
from steadyrl.memory.process import MB, readable
from steadyrl.memory.watch import MemoryWatch

ROOT = Path(__file__).parents[2]
GB = 1_000_000_000


@pytest.fixture
def machine(monkeypatch):
    """Simulate a machine of 32 GB with 16 GB free; return the list of its bounds."""
    limits = []
    monkeypatch.setattr(budget, "Bounds", lambda: SimpleNamespace(read=lambda: limits))
    limits.append(Bound("memory of this machine", 32 * GB, 16 * GB))
    return limits


def test_free_memory_is_the_bound_without_limits(machine):
    assert budget.tightest_bound().name == "memory of this machine"
    assert budget.available_bytes() == pytest.approx(0.95 * (16 - 0.512) * GB)


def test_the_tightest_cgroup_is_the_bound(machine):
    smallest = Bound("cgroup limit 8.00 GB", 8 * GB, 1 * GB)
    machine += [Bound("cgroup limit 32.0 GB", 32 * GB, 2 * GB), smallest]
    assert budget.tightest_bound() == smallest and smallest.free == 7 * GB


def test_allocations_beyond_the_budget_are_rejected_in_one_line(machine):
    machine.append(Bound("cgroup limit 8.00 GB", 8 * GB, GB))
    budget.require("replay", budget.available_bytes())
    with pytest.raises(MemoryBudgetError) as caught:
        budget.require("replay of 1,000,000 rows", int(28.2 * GB), unit_bytes=28_200)
    assert str(caught.value) == (
        "replay of 1,000,000 rows needs 28.2 GB but 6.27 GB are free (cgroup limit 8.00 GB): "
        "the largest capacity that fits is 220,000"
    )
    assert caught.value.exit_code == 7


def test_the_named_capacity_fits(machine):
    machine.append(Bound("cgroup limit 8.00 GB", 8 * GB, GB))
    budget.require("replay", 222_000 * 28_200, unit_bytes=28_200)
    with pytest.raises(MemoryBudgetError):
        budget.require("replay", 223_000 * 28_200, unit_bytes=28_200)


def test_allocations_without_a_capacity_are_rejected_too(machine):
    machine.append(Bound("cgroup limit 1.00 GB", GB, GB - 10_000_000))
    with pytest.raises(MemoryBudgetError, match=r"rollout needs 1\.00 GB but 0 B are free"):
        budget.require("rollout", GB)


def test_the_named_capacity_fits_a_real_address_space_limit():
    limit = mapped_by("steadyrl.memory.budget") + GB
    code = (
        f"LIMIT = {limit}"
        + """
import re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (LIMIT, resource.RLIM_INFINITY))
import numpy as np
from steadyrl.memory.budget import require
from steadyrl.core.errors import MemoryBudgetError
try:
    require("replay of 1,000,000 rows", 7_056_000_000, unit_bytes=7_056)
except MemoryBudgetError as error:
    print(error)
    capacity = int(re.search(r"fits is ([\\d,]+)", str(error))[1].replace(",", ""))
    require("replay", capacity * 7_056, unit_bytes=7_056)
    block = np.empty((capacity, 84, 84), np.uint8)
    print(block.nbytes == capacity * 7_056)
"""
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    error, allocated = out.stdout.splitlines()
    assert "needs 7.06 GB" in error and f"(address space limit {readable(limit)})" in error
    assert allocated == "True"


@pytest.mark.gpu
def test_cuda_memory_is_the_bound_on_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    _, total = torch.cuda.mem_get_info(device)
    assert 0 < budget.tightest_bound(device).free <= total
    with pytest.raises(MemoryBudgetError, match="cuda:0"):
        budget.require("replay", 2 * total, unit_bytes=100, device=device)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (12_000_000, "12.0 MB"),
        (7_056_000_000, "7.06 GB"),
        (28_224, "28.2 KB"),
        (141e9, "141 GB"),
    ],
)
def test_readable_formats_bytes(nbytes, text):
    assert readable(nbytes) == text


def test_unknown_memory_rejects_nothing(monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(budget, "Bounds", lambda: Bounds(Path("/nowhere")))
    monkeypatch.setattr(budget.psutil, "virtual_memory", refuse)
    monkeypatch.setattr(budget.psutil, "Process", refuse)
    budget.require("replay", 10**15)


def watched(settings, limit_mb, replay, on_host=None, **others):
    """Return the watch of a run that holds a replay of so many MB, and other buffers."""
    monitored = replace(settings, limit_mb=limit_mb)
    sizes = {"replay": replay, **others, "networks": 900}
    buffers = {name: size * MB for name, size in sizes.items() if size}
    return MemoryWatch(monitored, torch.device("cpu"), buffers=buffers, host_buffers=on_host)


@pytest.mark.parametrize(("left", "replay", "refused"), [
    (97, 300, False),  # learning takes 96
    (90, 300, True),
    (0, 300, True),
    (94, 4, False),
])  # fmt: skip
def test_a_replay_must_leave_what_learning_takes(settings, monkeypatch, left, replay, refused):
    level = Level(Bound("memory.limit_mb=800", 800 * MB, (800 - left) * MB, shared=False), 0)
    monkeypatch.setattr(OwnMeter, "confirm", lambda meter: level)
    watch = watched(settings, 800.0, replay)
    try:
        if not refused:
            watch.validate_room()
            return
        with pytest.raises(MemoryBudgetError) as error:
            watch.validate_room()
    finally:
        watch.close()
    percent = (replay - (96 - left)) * 100 // replay
    assert f"make it at most {percent} % as large" in str(error.value)
    assert f"with 300 MB of replay there are {readable(left * MB)} of memory left" in str(
        error.value
    )
    assert "memory.limit_mb=800" in str(error.value)


def test_several_buffers_are_named_with_what_they_leave_together(settings, monkeypatch):
    level = Level(Bound("memory.limit_mb=800", 800 * MB, 780 * MB, shared=False), 0)
    monkeypatch.setattr(OwnMeter, "confirm", lambda meter: level)
    with (
        closing(watched(settings, 800.0, 0, rollout=300, curiosity=80)) as watch,
        pytest.raises(MemoryBudgetError) as error,
    ):
        watch.validate_room()
    assert str(error.value) == (
        "with 300 MB of rollout and 80.0 MB of RND (agent.rnd) there are 20.0 MB of memory left "
        "(memory.limit_mb=800), and learning takes 96.0 MB: make them together at most 80 % as "
        "large, or give the run more memory"
    )


@pytest.mark.parametrize(("left", "replay", "enough"), [
    (-300, 300, 1300),  # a smaller replay would not help
    (-1, 4, 1000),
    (0, 4, 1000),
])  # fmt: skip
def test_a_limit_below_what_the_run_holds_is_refused(settings, monkeypatch, left, replay, enough):
    level = Level(Bound("memory.limit_mb=800", 800 * MB, (800 - left) * MB, shared=False), 0)
    monkeypatch.setattr(OwnMeter, "confirm", lambda meter: level)
    with (
        closing(watched(settings, 800.0, replay)) as watch,
        pytest.raises(MemoryBudgetError) as error,
    ):
        watch.validate_room()
    assert f"the run's processes hold {readable((800 - left) * MB)} before" in str(error.value)
    assert str(error.value).endswith(f"set memory.limit_mb={enough} or more")


def test_a_replay_on_a_card_is_not_blamed_for_memory_of_the_host(settings, monkeypatch):
    level = Level(Bound("memory.limit_mb=800", 800 * MB, 810 * MB, shared=False), 0, is_own=True)
    monkeypatch.setattr(OwnMeter, "confirm", lambda meter: level)
    with closing(watched(settings, 800.0, 3000, on_host={"replay": 2 * MB})) as watch:
        with pytest.raises(MemoryBudgetError, match=r"set memory\.limit_mb=1010 or more$"):
            watch.validate_room()
        watch._monitor.kept = lambda: 810 * MB
        with pytest.raises(MemoryBudgetError) as error:
            watch.check()
        assert "capacity" not in str(error.value) and "replay 3.00 GB" not in str(error.value)
        assert watch.measure(0)["memory/replay_mb"] == 3000
