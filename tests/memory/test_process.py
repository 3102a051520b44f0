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

from steadyrl.memory import process as module
from steadyrl.memory.process import (
    read_heap,
    read_peak,
    read_process_memory,
    read_rss,
    read_tree,
)

MB = 1_000_000


def test_rss_counts_touched_pages(process):
    before = read_rss(process)
    block = fresh_pages(50 * MB)
    assert read_rss(process) - before > 0.9 * block.nbytes


def test_the_peak_excludes_the_parent_process():
    block = fresh_pages(200 * MB)
    command = [
        sys.executable,
        "-c",
        "from steadyrl.memory.process import read_peak; print(read_peak())",
    ]
    root = Path(__file__).parents[2]
    peak = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert int(peak) < block.nbytes <= read_peak()


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
            os.read(read_tail, 1)  # blocks until the parent closes its end
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
    workers = [worker for worker in now.workers if worker.pid in children]
    assert len({worker.name for worker in workers}) == 4  # so that none hides another
    assert all(worker.heap > 0.9 * shared.nbytes for worker in workers)
    assert sum(worker.kept for worker in workers) < 0.5 * sum(worker.heap for worker in workers)
    assert sum(worker.kept for worker in now.workers) < now.kept < before.kept + 0.5 * shared.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="PSS")
def test_mapped_files_are_not_heap(process, tmp_path):
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


def test_vanishing_and_inaccessible_children_are_tolerated(process, monkeypatch):
    def vanished():
        raise psutil.NoSuchProcess(1)

    def hidden():
        raise psutil.AccessDenied(1)

    none = 2**30  # no such process, so the kernel has no smaps_rollup
    vanishing = SimpleNamespace(pid=none, memory_full_info=vanished)
    inaccessible = SimpleNamespace(
        pid=none, memory_full_info=hidden, memory_info=lambda: SimpleNamespace(rss=7_000 * MB)
    )
    own_pss = read_tree(process).pss
    monkeypatch.setattr(process, "children", lambda recursive: [vanishing, inaccessible])
    tree = read_tree(process)
    assert tree.children == 1
    # PSS varies with other processes that map the same libraries, but by far less.
    assert abs(tree.pss - own_pss - 7_000 * MB) < 100 * MB


def test_anonymous_memory_is_kept_where_linux_does_not_say_its_part(process, monkeypatch):
    """Before Linux 5.4 smaps_rollup has no Pss_Anon, Pss_File and Pss_Shmem."""
    whole = module._rollup(process.pid)
    old = {name: size for name, size in whole.items() if not name.startswith("Pss_")}
    monkeypatch.setattr(module, "_rollup", lambda pid: old)
    assert read_process_memory(process).own == old["Anonymous"] > 0
