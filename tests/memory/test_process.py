import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from pages import fresh_pages

from steadyrl.memory.monitor import ThrottledReading
from steadyrl.memory.process import read_heap, read_peak, read_rss, read_tree

MB = 1_000_000


def test_rss_sees_what_is_touched(process):
    before = read_rss(process)
    block = fresh_pages(50 * MB)
    assert read_rss(process) - before > 0.9 * block.nbytes


def test_the_peak_is_that_of_this_process_and_not_of_the_one_that_started_it():
    block = fresh_pages(200 * MB)
    command = [
        sys.executable,
        "-c",
        "from steadyrl.memory.process import read_peak; print(read_peak())",
    ]
    root = Path(__file__).parents[2]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert int(told) < block.nbytes <= read_peak()


@pytest.mark.skipif(sys.platform != "linux", reason="fork and PSS")
def test_pages_shared_with_children_count_once(process):
    shared = fresh_pages(60 * MB)
    before = read_tree(process)
    read_tail, write_end = os.pipe()
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os.read(read_tail, 1)  # until the parent closes its end
            os._exit(0)
        children.append(child)
    try:
        now = read_tree(process)
        total_rss = sum(read_rss(p) for p in [process, *process.children()])
    finally:
        os.close(write_end)
        for child in children:
            os.waitpid(child, 0)
        os.close(read_tail)
    assert now.children - before.children == 4
    assert now.pss - before.pss < 0.5 * shared.nbytes
    assert total_rss - before.pss > 3 * shared.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="PSS")
def test_mapped_files_are_nobodys_own(process, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(40 * MB))
    before, heap_before = read_tree(process), read_heap(process)
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0
    now = read_tree(process)
    assert now.pss - before.pss > 0.9 * mapped.size
    assert now.heap - before.heap < 0.1 * mapped.size
    assert read_heap(process) - heap_before < 0.1 * mapped.size
    heap = fresh_pages(40 * MB)
    assert read_tree(process).heap - now.heap > 0.9 * heap.size
    assert read_heap(process) - heap_before > 0.9 * heap.size


def test_handles_are_counted(process):
    before = read_tree(process)
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    pipes = [os.pipe() for _ in range(2)]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        now = read_tree(process)
        assert now.threads - before.threads == 3
        assert now.open_files - before.open_files == 5  # two pipes and the child's stdin
        assert now.children - before.children == 1
    finally:
        stop.set()
        child.communicate(b"\n")
        for thread in threads:
            thread.join()
        for end in (end for pipe in pipes for end in pipe):
            os.close(end)
    assert process.num_fds() == before.open_files


def test_a_child_that_vanishes_or_hides_is_no_error(process, monkeypatch):
    def vanished():
        raise psutil.NoSuchProcess(1)

    def hidden():
        raise psutil.AccessDenied(1)

    none = 2**30  # no such process, so the kernel has no sums of it
    gone = SimpleNamespace(pid=none, memory_full_info=vanished)
    closed = SimpleNamespace(
        pid=none, memory_full_info=hidden, memory_info=lambda: SimpleNamespace(rss=7_000 * MB)
    )
    own = read_tree(process).pss
    monkeypatch.setattr(process, "children", lambda recursive: [gone, closed])
    tree = read_tree(process)
    assert tree.children == 1
    # Our own share moves with whoever else maps the same libraries; this is far beyond it.
    assert abs(tree.pss - own - 7_000 * MB) < 100 * MB


def test_a_costly_reading_is_rare(clock):
    calls = []

    def read():
        clock.now += 0.1
        calls.append(clock.now)
        return len(calls)

    reading = ThrottledReading(read, every_seconds=10, clock=clock, effort=clock)
    assert reading.value == 1 and not reading.poll()
    clock.now += 39  # more than every_seconds, but less than 400 times what it takes
    assert not reading.poll() and reading.value == 1
    clock.now += 2
    assert reading.poll() and reading.value == 2


def test_waiting_for_a_busy_machine_is_not_what_a_reading_takes(clock):
    def read():
        clock.now += 5  # but hardly any of them on the processor

    reading = ThrottledReading(read, every_seconds=10, clock=clock)
    clock.now += 10
    assert reading.poll()


def test_the_interval_is_kept_by_a_cheap_reading_and_zero_means_always(clock):
    rare = ThrottledReading(lambda: clock.now, every_seconds=10, clock=clock)
    always = ThrottledReading(lambda: clock.now, every_seconds=0, clock=clock)
    clock.now = 9.0
    assert not rare.poll() and always.poll()
    clock.now = 10.0
    assert rare.poll() and rare.value == 10.0
