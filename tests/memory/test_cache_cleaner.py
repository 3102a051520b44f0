import ctypes
import gc
import logging
import mmap
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from steadyrl.memory import cache_cleaner as cache
from steadyrl.memory.cache_cleaner import CacheCleaner, unmap_clean_pages
from steadyrl.memory.settings import CacheSettings

MB = 1_000_000
CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
READ_ONLY = 1  # PROT_READ

# Prints RSS before and after, and whether a product is the same.
UNMAPPING = """
import psutil, torch
from steadyrl.memory.cache_cleaner import unmap_clean_pages
from steadyrl.memory.process import read_rss
process = psutil.Process()
torch.manual_seed(0)
first, second = torch.randn(32, 32), torch.randn(32, 32)
before = first @ second
before_rss = read_rss(process)
unmap_clean_pages()
after_rss = read_rss(process)
print(before_rss, after_rss, torch.equal(before, first @ second))
"""

# Allocates 19 MB in blocks repeatedly; prints the number of page faults.
REALLOCATING = """
import resource
import numpy as np
from steadyrl.memory.cache_cleaner import keep_freed_memory

def allocate(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        blocks = [np.ones(300_000) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

allocate(3)
keep_freed_memory()
allocate(3)
print(allocate(20))
"""


class Memory:
    """Simulated RSS."""

    def __init__(self):
        self.rss = 100 * MB

    def __call__(self):
        return self.rss


class Slow(Memory):
    """Simulated RSS whose reading takes a second."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def __call__(self):
        self.clock.now += 1
        return self.rss


def build_cleaner(clock, memory=None, **changes):
    plain = {"every_updates": 100, "every_episodes": 10, "every_rollouts": 3} | changes
    settings = CacheSettings(**({"min_reclaimable_mb": 0.0} | plain))
    return CacheCleaner(settings, CPU, memory or Memory(), clock)


def test_the_cleaner_runs_every_n_updates_episodes_and_rollouts(clock):
    cleaner = build_cleaner(clock)
    for _ in range(99):
        cleaner.note("updates", 1)
    assert cleaner.cost.times == 0
    cleaner.note("updates", 1)
    assert cleaner.cost.times == 1
    cleaner.note("updates", 250)  # several crossings at once clean once
    assert cleaner.cost.times == 2
    cleaner.note("updates", 50)
    assert cleaner.cost.times == 3
    cleaner.note("episodes", 9)
    cleaner.note("episodes", 1)
    assert cleaner.cost.times == 4
    for _ in range(6):
        cleaner.note("rollouts", 1)
    assert cleaner.cost.times == 6


def test_intervals_of_zero_never_clean(clock):
    cleaner = build_cleaner(clock, every_updates=0, every_episodes=0, every_rollouts=0)
    for _ in range(1000):
        cleaner.note("updates", 1)
        cleaner.note("episodes", 1)
        cleaner.note("rollouts", 1)
    assert cleaner.cost.times == 0


def test_the_cleaner_runs_only_above_min_reclaimable_mb(clock):
    memory = Memory()
    cleaner = build_cleaner(clock, memory, min_reclaimable_mb=64.0)
    clock.now += 1000
    cleaner.note("updates", 100)
    memory.rss += 63 * MB
    cleaner.note("updates", 100)
    assert cleaner.cost.times == 0
    memory.rss += 2 * MB
    cleaner.note("updates", 100)
    assert cleaner.cost.times == 0  # RSS is read at intervals only
    clock.now += 0.1
    cleaner.note("updates", 100)
    assert cleaner.cost.times == 1
    cleaner.note("updates", 100)  # unreclaimable memory is not retried at once
    assert cleaner.cost.times == 1


def test_a_cleaning_says_what_it_gave_back_and_in_how_long(clock, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "steadyrl")
    memory, freed = Memory(), [12, 30, -5]  # the last time something else took more meanwhile
    cleaner = build_cleaner(clock, memory)

    def reclaim(device, own_process):
        memory.rss -= freed.pop(0) * MB
        clock.now += 0.045

    monkeypatch.setattr(cache, "reclaim", reclaim)
    for _ in range(3):
        cleaner.clean()
    assert caplog.messages[:3] == [
        f"cleaning gave back {mb} MB in 45 ms" for mb in ("12.0", "30.0", "-5.0")
    ]
    assert (cleaner.cost.times, cleaner.cost.returned) == (3, 42 * MB)


def test_the_cleaner_limits_its_share_of_time(clock):
    memory = Slow(clock)
    cleaner = build_cleaner(clock, memory, min_reclaimable_mb=64.0)
    memory.rss += 100 * MB
    clock.now += 10
    cleaner.note("updates", 100)
    assert cleaner.cost.times == 0
    clock.now += 200
    cleaner.note("updates", 100)
    assert cleaner.cost.times == 1
    memory.rss += 100 * MB
    clock.now += 400  # one second was spent, another would be: at most 2 in 800
    cleaner.note("updates", 100)
    assert cleaner.cost.times == 1
    clock.now += 200
    cleaner.note("updates", 100)
    assert cleaner.cost.times == 2


def test_unreleasable_pools_do_not_trigger_cleaning_again(clock, monkeypatch):
    reserved = [500 * MB]
    settings = CacheSettings(
        every_updates=1, every_episodes=0, every_rollouts=0, min_reclaimable_mb=64.0
    )
    monkeypatch.setattr(cache, "unused_by_allocator", lambda device: reserved[0])
    cleaner = CacheCleaner(settings, CPU, Memory(), clock)

    def clean():
        clock.now += 1000
        cleaner.note("updates", 1)
        return cleaner.cost.times

    assert clean() == 0  # reserved before the run
    reserved[0] = 570 * MB
    assert clean() == 1
    assert clean() == clean() == 1  # a CUDA graph's pool, which cleaning cannot release
    reserved[0] = 100 * MB
    assert clean() == 1
    reserved[0] = 170 * MB  # more than after the last release
    assert clean() == 2


def test_garbage_in_cycles_is_collected(clock):
    class Node:
        pass

    gc.collect()
    gc.disable()
    try:
        node = Node()
        node.itself = node
        alive = weakref.ref(node)
        del node
        assert alive() is not None
        build_cleaner(clock).note("updates", 100)
        assert alive() is None
    finally:
        gc.enable()


def test_costs_are_reported_once_and_warned_of_above_one_percent(clock, caplog):
    cleaner = build_cleaner(clock, Slow(clock), every_updates=1)
    with caplog.at_level(logging.WARNING, "steadyrl"):
        clock.now += 990
        cleaner.note("updates", 1)
        assert cleaner.cost.pop_milliseconds() == 1000.0
        assert cleaner.cost.pop_milliseconds() == 0.0
        assert caplog.messages == []
        for _ in range(5):
            cleaner.note("updates", 1)
        assert caplog.messages == []
        for _ in range(12):
            cleaner.note("updates", 1)
    assert "memory.cache.every_updates" in caplog.messages[0]
    assert len(caplog.messages) == 1  # at about 11 seconds; not yet at twice that


@pytest.mark.skipif(sys.platform != "linux", reason="madvise and /proc/self/smaps")
def test_unmapping_clean_pages_frees_memory_and_changes_nothing():
    done = subprocess.run(
        [sys.executable, "-c", UNMAPPING],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    reserved, after, same = done.stdout.split()
    assert int(after) < int(reserved) - 50 * MB
    assert same == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_freed_memory_is_reused_without_page_faults():
    command = [sys.executable, "-c", REALLOCATING]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, check=True)
    assert int(done.stdout) < 20 * 8  # less than one page fault per block of 586 pages


@pytest.mark.skipif(sys.platform != "linux", reason="madvise and /proc/self/smaps")
def test_written_pages_are_not_unmapped(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"f" * 4 * PAGE)
    with file.open("r+b") as opened:
        untouched = mmap.mmap(opened.fileno(), 4 * PAGE, flags=mmap.MAP_PRIVATE, prot=READ_ONLY)
        written = mmap.mmap(opened.fileno(), 4 * PAGE, flags=mmap.MAP_PRIVATE)
    written[PAGE] = ord("w")  # as the dynamic loader writes before making a table read-only
    start = ctypes.addressof(ctypes.c_char.from_buffer(written))
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(start), ctypes.c_size_t(4 * PAGE), READ_ONLY) == 0
    unmap_clean_pages()
    assert written[:] == b"f" * PAGE + b"w" + b"f" * (3 * PAGE - 1)
    assert untouched[:] == b"f" * 4 * PAGE


def test_growth_counts_from_the_start_of_the_run(clock):
    memory = Memory()
    cleaner = build_cleaner(clock, memory, min_reclaimable_mb=64.0)
    clock.now += 1000
    memory.rss -= 40 * MB
    cleaner.begin()
    memory.rss += 65 * MB
    cleaner.note("updates", 100)
    assert cleaner.cost.times == 1


@pytest.mark.gpu
def test_cuda_blocks_are_released(clock):
    settings = CacheSettings(
        every_updates=1, every_episodes=0, every_rollouts=0, min_reclaimable_mb=64.0
    )
    device = torch.device("cuda", 0)
    cleaner = CacheCleaner(settings, device, Memory(), clock)
    clock.now += 1000  # cleaning is affordable by now
    torch.cuda.empty_cache()
    block = torch.zeros(100 * MB, dtype=torch.uint8, device=device)
    cleaner.note("updates", 1)
    assert cleaner.cost.times == 0
    del block
    reserved = torch.cuda.memory_reserved(device)
    clock.now += 1
    cleaner.note("updates", 1)
    assert cleaner.cost.times == 1
    assert torch.cuda.memory_reserved(device) <= reserved - 64 * MB
