import gc
import logging
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from pages import fresh_pages

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.host.malloc import trim
from steadyrl.memory.memory_scope import MemoryScope
from steadyrl.memory.monitor import Monitor
from steadyrl.memory.process import read_tree
from steadyrl.memory.settings import MonitorSettings
from steadyrl.memory.watch import MemoryWatch

MB = 1_000_000
CPU = torch.device("cpu")


@pytest.fixture
def make(alert_settings):
    watches = []

    def build(**changes):
        watches.append(MemoryWatch(replace(alert_settings, **changes), CPU))
        return watches[-1]

    yield build
    for watch in watches:
        watch.close()
        watch.close()


def test_the_watch_reports_its_tags_in_mb(alert_settings, process):
    watch = MemoryWatch(alert_settings, CPU, buffers={"replay": 7_056_000})
    scalars = watch.measure(1000)
    watch.close()
    assert set(scalars) == {
        "memory/rss_mb",
        "memory/tree_pss_mb",
        "memory/swap_mb",
        "memory/available_mb",
        "memory/children",
        "memory/threads",
        "memory/open_files",
        "memory/live_tensors",
        "memory/live_tensors_mb",
        "memory/replay_mb",
        "memory/growth_mb_per_million_steps",
        "memory/cache_clear_ms",
    }
    assert scalars["memory/rss_mb"] == pytest.approx(process.memory_info().rss / MB, rel=0.1)
    tree = (process, *process.children(recursive=True))  # other tests may have left helpers
    assert 0 < scalars["memory/tree_pss_mb"] < 1.1 * sum(p.memory_info().rss for p in tree) / MB
    assert scalars["memory/replay_mb"] == 7.056
    assert scalars["memory/threads"] == process.num_threads()
    assert all(type(value) is float for value in scalars.values())


def test_live_tensors_are_counted(make):
    watch = make()
    before = watch.measure(0)
    kept = [torch.zeros(1000) for _ in range(50)]
    after = watch.measure(1)
    assert after["memory/live_tensors"] - before["memory/live_tensors"] == len(kept)
    assert after["memory/live_tensors_mb"] - before["memory/live_tensors_mb"] == pytest.approx(0.2)


def test_the_estimate_follows_growth_between_tree_readings(process, clock):
    settings = MonitorSettings(every_seconds=0, tree_every_seconds=1000, tensors_every_seconds=1000)
    monitor = Monitor(settings, CPU, {}, clock)
    first = monitor.sample()
    block_of_memory = fresh_pages(50 * MB)
    second = monitor.sample()
    assert not second.tree_is_new and second.tree is first.tree
    assert second.kept - first.kept > 0.9 * block_of_memory.nbytes
    assert second.heap - first.heap > 0.9 * block_of_memory.nbytes


GROWS = "kept = []\nwhile input():\n    kept.append(b'1' * 50_000_000)\n    print(flush=True)"


def test_workers_are_read_between_costly_tree_readings(clock, monkeypatch):
    def costly(process):
        begin = time.thread_time()
        while time.thread_time() < begin + 0.05:
            pass
        return read_tree(process)

    monkeypatch.setattr("steadyrl.memory.monitor.read_tree", costly)
    settings = MonitorSettings(every_seconds=0, tree_every_seconds=1, tensors_every_seconds=1000)
    child = subprocess.Popen(
        [sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        monitor = Monitor(settings, CPU, {}, clock)
        child.stdin.write(b"grow\n")
        child.stdin.flush()
        assert child.stdout.readline()
        first = monitor.sample()
        assert first.workers == ()  # no reading was due
        clock.now += 10
        then = monitor.sample()
        child.stdin.write(b"grow\n")
        child.stdin.flush()
        assert child.stdout.readline()
        assert monitor.sample().workers == ()
        clock.now += 10 - 1
        now = monitor.sample()
        assert now.tree is first.tree and not now.tree_is_new
        grown = {worker.pid: worker.heap for worker in now.workers}[child.pid]
        assert grown - {worker.pid: worker.heap for worker in then.workers}[child.pid] > 45 * MB
        clock.now += 1000
        assert monitor.sample().tree_is_new
    finally:
        child.communicate(b"\n")
    clock.now += 10
    assert child.pid not in [worker.pid for worker in monitor.sample().workers]


def test_a_run_above_its_memory_limit_is_stopped(make, process):
    gc.collect()  # garbage of other tests must not be freed meanwhile
    trim()
    watch = make(limit_mb=read_tree(process).kept / MB + 100)
    watch.check()
    kept = fresh_pages(600 * MB)
    watch._limit._due = time.perf_counter()
    with pytest.raises(MemoryBudgetError, match=r"memory\.limit_mb=.* is reached") as caught:
        watch.check()
    assert caught.value.exit_code == 7 and "\n" not in str(caught.value)
    assert len(kept)


def test_at_a_limit_the_process_tree_is_read_once_before_and_once_after_cleaning(
    make, process, monkeypatch
):
    watch = make(limit_mb=1e6)
    own = watch._meters[0]
    own._limit = read_tree(process).kept // 2
    monitor, readings = watch._monitor, []
    read = monitor._tree._read
    monkeypatch.setattr(monitor._tree, "_read", lambda: readings.append(0) or read())
    watch._limit._due = 0.0
    with pytest.raises(MemoryBudgetError, match="This process holds"):
        watch.check()
    assert len(readings) == 2


UNREADABLE = [
    FileNotFoundError(2, "No such file or directory", "/proc/1/statm"),
    PermissionError(13, "Permission denied"),
    psutil.AccessDenied(1),
    psutil.NoSuchProcess(1),
]


@pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("from_the_start", [True, False])
def test_unreadable_memory_is_warned_of_once(
    alert_settings, monkeypatch, caplog, error, from_the_start
):
    def raise_error(*_, **__):
        raise error

    def make_unreadable():
        for name in ("__init__", "memory_info", "memory_full_info", "children", "num_fds"):
            monkeypatch.setattr(psutil.Process, name, raise_error)

    if from_the_start:
        make_unreadable()
    watch = MemoryWatch(replace(alert_settings, limit_mb=1e6, profile=True), CPU)
    if not from_the_start:
        assert watch.measure(0)["memory/rss_mb"] > 0
        make_unreadable()
    for step in range(1, 5):
        with MemoryScope("update", report=watch._profile.add):
            watch.on_update(100)
        watch.on_episodes(100)
        watch.on_rollout()
        watch.check()
        assert set(watch.measure(step)) == {"memory/rss_mb"}
    (message,) = caplog.messages
    assert "cannot read memory usage" in message and type(error).__name__ in message
    monkeypatch.undo()
    assert len(watch.measure(9)) > 8  # readings resume once they are possible
    watch.close()


def test_the_estimate_alone_does_not_stop_a_run(make, process):
    watch = make(limit_mb=read_tree(process).kept / MB + 50)
    watch.measure(0)
    watch.check()
    watch._monitor._heap_then -= 500 * MB  # as if pages shared with workers had been copied
    watch._limit._due = time.perf_counter()
    watch.check()


def test_garbage_is_collected_before_stopping_a_run(make, process):
    class Cycle:
        pass

    gc.collect()
    watch = make(limit_mb=read_tree(process).kept / MB + 100)
    gc.disable()
    try:
        garbage = Cycle()
        garbage.itself, garbage.block = garbage, fresh_pages(300 * MB)
        del garbage
        watch._limit._due = time.perf_counter()
        watch.check()
    finally:
        gc.enable()
    assert watch._cleaner.cost.times == 1


def test_the_watch_notifies_the_cleaner(make, settings):
    cache = replace(settings.cache, min_reclaimable_mb=0.0)
    watch = make(cache=replace(cache, every_updates=2, every_episodes=3, every_rollouts=1))
    for _ in range(4):
        watch.on_update()
    watch.on_episodes(0)
    watch.on_episodes(3)
    watch.on_rollout()
    assert watch._cleaner.cost.times == 4
    assert watch.measure(0)["memory/cache_clear_ms"] > 0
    assert watch.measure(1)["memory/cache_clear_ms"] == 0


def test_the_profile_is_logged_every_10k_steps_and_100_rollouts_and_at_the_end(make, caplog):
    watch = make(profile=True)
    with caplog.at_level(logging.INFO, "steadyrl"):
        for step in (4_000, 9_999, 10_000, 15_000):
            watch.measure(step)
        for _ in range(100):
            watch.on_rollout()
        watch.measure(15_001)
        watch.measure(15_500)
        watch.finish(15_500)
        watch.finish(15_500)
    assert [m.splitlines()[0] for m in caplog.messages] == [
        f"memory profile, to step {step}, on the host" for step in ("10,000", "15,001", "15,500")
    ]
    watch.close()


def test_methods_are_wrapped_only_with_a_profile(make, caplog):
    class Agent:
        def update(self):
            return 1

    for profile in (False, True):
        watch, agent = make(profile=profile), Agent()
        watch.profile({"update": ((agent, "update"),)})
        assert ("update" in vars(agent)) is profile  # without a profile the method is not wrapped
        assert agent.update() == 1
        with caplog.at_level(logging.INFO, "steadyrl"):
            watch.measure(10_000)
    (table,) = caplog.messages
    [row] = [line for line in table.splitlines() if line.startswith("update")]
    assert row.split()[1] == "1"


def test_the_profile_names_tensors_with_graphs(alert_settings, caplog):
    agent = torch.nn.Linear(2, 2)
    settings = replace(alert_settings, profile=True)
    watch = MemoryWatch(settings, CPU, holders={"agent": agent})
    with caplog.at_level(logging.INFO, "steadyrl"):
        watch.measure(10_000)
        agent.losses = [agent(torch.ones(2)).sum()]
        watch.measure(20_000)
    watch.close()
    clean, planted = caplog.messages
    assert clean.endswith("tensors that keep their graph:\n  none")
    assert (
        "\n  agent.losses[0]: float32[] on cpu with their graph, 4 bytes, 1 references" in planted
    )


def test_a_stopped_leak_is_a_budget_error(make, alert_settings):
    watch = make(leak=replace(alert_settings.leak, action="stop", max_growth_mb=0))
    kept = []
    with pytest.raises(MemoryBudgetError, match="host memory grew by") as caught:
        for step in range(40):
            kept.append(fresh_pages(30 * MB))
            watch.measure(step * 1000)
    assert caught.value.exit_code == 7 and len(kept) < 40


def test_full_samples_are_spaced_in_time(settings, clock):
    watch = MemoryWatch(settings, CPU, clock=clock)
    lines = []
    for step in range(1000):
        lines.append(watch.measure(step))
        clock.now += 0.01
    watch.close()
    full = [line for line in lines if len(line) > 1]
    assert len(lines[0]) > 8 and 9 <= len(full) <= 11
    assert all(line["memory/rss_mb"] > 0 for line in lines)


RUN_THAT_GROWS = """
import sys, yaml
import numpy as np, torch
from pathlib import Path
from dataclasses import replace
from steadyrl.core.errors import MemoryBudgetError
from steadyrl.memory.settings import CacheSettings, LeakSettings, MemorySettings, MonitorSettings
from steadyrl.memory.settings import SlowdownSettings
from steadyrl.memory.watch import MemoryWatch
plain = yaml.safe_load(Path("configs/memory/default.yaml").read_text())
settings = MemorySettings(**{**plain, "monitor": MonitorSettings(**plain["monitor"]),
    "cache": CacheSettings(**plain["cache"]), "leak": LeakSettings(**plain["leak"]),
    "slowdown": SlowdownSettings(**plain["slowdown"]),
    "limit_mb": 600.0})
watch = MemoryWatch(settings, torch.device("cpu"))
kept = []
try:
    while len(kept) < 2000:
        kept.append(np.ones(1_000_000, np.uint8))
        watch.on_update(1)
        watch.check()
except MemoryBudgetError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_growing_process_exits_with_7_at_its_limit(request):
    out = subprocess.run(
        [sys.executable, "-c", RUN_THAT_GROWS],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 7, out.stderr
    (line,) = out.stdout.splitlines()
    assert "memory.limit_mb=600 is reached" in line
