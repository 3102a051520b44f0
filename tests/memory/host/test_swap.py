"""Pages in swap are memory of the run, by a made-up /proc: where no machine swaps."""

from types import SimpleNamespace

import pytest

from steadyrl.memory import process as readings
from steadyrl.memory.leak import LeakDetector
from steadyrl.memory.process import Worker, read_heap, read_heaps, read_process_memory

KB = 1024
PAGE = 4096
ROLLUP = """\
00400000-7fff00000000 ---p 00000000 00:00 0    [rollup]
Rss:               {rss} kB
Pss:               {rss} kB
Pss_Anon:          {rss} kB
Pss_Shmem:             0 kB
Anonymous:         {rss} kB
Swap:              {swap} kB
SwapPss:           {swap} kB
"""


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """Return a function that makes a process of so many kB in memory and in swap."""
    monkeypatch.setattr(readings, "PROC", tmp_path)

    def make(rss, swap, pid=7):
        place = tmp_path / str(pid)
        place.mkdir(exist_ok=True)
        (place / "smaps_rollup").write_text(ROLLUP.format(rss=rss, swap=swap))
        (place / "status").write_text(f"Name:\tpython\nVmRSS:\t{rss} kB\nVmSwap:\t   {swap} kB\n")
        (place / "statm").write_text(f"99999 {rss * KB // PAGE} 0 1 0 1 0")
        memory = SimpleNamespace(rss=rss * KB, shared=0)
        return SimpleNamespace(pid=pid, memory_info=lambda: memory)

    return make


def test_moving_pages_to_swap_frees_nothing(proc):
    before, after = (4000, 0), (1000, 3000)
    for sizes in (before, after):
        process = proc(*sizes)
        memory = read_process_memory(process)
        assert memory.heap == read_heap(process) == 4000 * KB
        assert read_heaps([Worker(7, "a worker", 0, 0)]) == {7: 4000 * KB}
        assert memory.own + memory.swap == 4000 * KB
        assert memory.pss == sizes[0] * KB and memory.swap == sizes[1] * KB


def test_a_leak_is_seen_though_the_run_looks_no_larger(proc, alert_settings):
    """It leaks 1 MB a sample and as much is moved to swap: its resident memory stays."""
    detector = LeakDetector(alert_settings.leak, lambda: False)
    warnings = []
    for step in range(60):
        process = proc(200_000, step * 1000)
        found = detector.observe_bytes("host", step, read_heap(process))
        warnings += [found] if found else []
    detector.close()
    assert warnings and "host memory grew by" in warnings[0]


def test_a_process_without_such_a_line_has_no_swap(proc, tmp_path):
    process = proc(1000, 0)
    (tmp_path / "7/status").write_text("Name:\tpython\n")
    assert read_heap(process) == 1000 * KB
