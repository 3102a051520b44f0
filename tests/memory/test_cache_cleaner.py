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

# Says what is resident before and after, and the same product twice.
LETTING_GO = """
import psutil, torch
from steadyrl.memory.cache_cleaner import unmap_clean_pages
from steadyrl.memory.process import read_rss
process = psutil.Process()
torch.manual_seed(0)
first, second = torch.randn(32, 32), torch.randn(32, 32)
before = first @ second
held = read_rss(process)
unmap_clean_pages()
left = read_rss(process)
print(held, left, torch.equal(before, first @ second))
"""

# Asks for 19 MB in blocks again and again; says how many pages were cleared for it.
ASKING_AGAIN = """
import resource
import numpy as np
from steadyrl.memory.cache_cleaner import keep_freed_memory

def ask(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        blocks = [np.ones(300_000) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ask(3)
keep_freed_memory()
ask(3)
print(ask(20))
"""


class Memory:
    """Resident bytes as a test wants them."""

    def __init__(self):
        self.rss = 100 * MB

    def __call__(self):
        return self.rss


class Slow(Memory):
    """Reading it takes a second, which is then the cleaning's cost."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def __call__(self):
        self.clock.now += 1
        return self.rss


def cleaner(clock, memory=None, **changes):
    plain = {"every_updates": 100, "every_episodes": 10, "every_rollouts": 3} | changes
    settings = CacheSettings(**({"min_reclaimable_mb": 0.0} | plain))
    return CacheCleaner(settings, CPU, memory or Memory(), clock)


def test_it_cleans_at_crossings_of_updates_episodes_and_rollouts(clock):
    cleaning = cleaner(clock)
    for _ in range(99):
        cleaning.note("updates", 1)
    assert cleaning.cost.times == 0
    cleaning.note("updates", 1)
    assert cleaning.cost.times == 1
    cleaning.note("updates", 250)  # several crossings at once are one occasion
    assert cleaning.cost.times == 2
    cleaning.note("updates", 50)
    assert cleaning.cost.times == 3
    cleaning.note("episodes", 9)
    cleaning.note("episodes", 1)
    assert cleaning.cost.times == 4
    for _ in range(6):
        cleaning.note("rollouts", 1)
    assert cleaning.cost.times == 6


def test_zero_is_never(clock):
    cleaning = cleaner(clock, every_updates=0, every_episodes=0, every_rollouts=0)
    for _ in range(1000):
        cleaning.note("updates", 1)
        cleaning.note("episodes", 1)
        cleaning.note("rollouts", 1)
    assert cleaning.cost.times == 0


def test_only_when_there_is_something_to_reclaim(clock):
    memory = Memory()
    cleaning = cleaner(clock, memory, min_reclaimable_mb=64.0)
    clock.now += 1000
    cleaning.note("updates", 100)
    memory.rss += 63 * MB
    cleaning.note("updates", 100)
    assert cleaning.cost.times == 0
    memory.rss += 2 * MB
    cleaning.note("updates", 100)
    assert cleaning.cost.times == 0  # a fast run asks more often than it is worth looking
    clock.now += 0.1
    cleaning.note("updates", 100)
    assert cleaning.cost.times == 1
    cleaning.note("updates", 100)  # what was not reclaimed is not tried again at once
    assert cleaning.cost.times == 1


def test_it_waits_until_it_can_afford_to(clock):
    memory = Slow(clock)
    cleaning = cleaner(clock, memory, min_reclaimable_mb=64.0)
    memory.rss += 100 * MB
    clock.now += 10
    cleaning.note("updates", 100)
    assert cleaning.cost.times == 0
    clock.now += 200
    cleaning.note("updates", 100)
    assert cleaning.cost.times == 1
    memory.rss += 100 * MB
    clock.now += 400  # a second was spent, another would be: two in 800 at most
    cleaning.note("updates", 100)
    assert cleaning.cost.times == 1
    clock.now += 200
    cleaning.note("updates", 100)
    assert cleaning.cost.times == 2


def test_pools_that_stay_held_are_not_taken_for_reclaimable_again_and_again(clock, monkeypatch):
    held = [500 * MB]
    settings = CacheSettings(
        every_updates=1, every_episodes=0, every_rollouts=0, min_reclaimable_mb=64.0
    )
    monkeypatch.setattr(cache, "unused_by_allocator", lambda device: held[0])
    cleaning = CacheCleaner(settings, CPU, Memory(), clock)

    def look():
        clock.now += 1000
        cleaning.note("updates", 1)
        return cleaning.cost.times

    assert look() == 0  # held from before
    held[0] = 570 * MB
    assert look() == 1
    assert look() == look() == 1  # a CUDA graph's pool: cleaning did not give it back
    held[0] = 100 * MB
    assert look() == 1
    held[0] = 170 * MB  # more than is left, if less than there ever was
    assert look() == 2


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
        cleaner(clock).note("updates", 100)
        assert alive() is None
    finally:
        gc.enable()


def test_its_cost_is_reported_once_and_a_share_over_one_percent_is_warned_of(clock, caplog):
    cleaning = cleaner(clock, Slow(clock), every_updates=1)
    with caplog.at_level(logging.WARNING, "steadyrl"):
        clock.now += 990
        cleaning.note("updates", 1)
        assert cleaning.cost.pop_milliseconds() == 1000.0
        assert cleaning.cost.pop_milliseconds() == 0.0
        assert caplog.messages == []
        for _ in range(5):
            cleaning.note("updates", 1)
        assert caplog.messages == []
        for _ in range(12):
            cleaning.note("updates", 1)
    assert "memory.cache.every_updates" in caplog.messages[0]
    assert len(caplog.messages) == 1  # at about 11 seconds; twice that is not reached


@pytest.mark.skipif(sys.platform != "linux", reason="madvise, and a list of mappings")
def test_code_that_only_starting_took_is_no_longer_resident_and_works():
    told = subprocess.run(
        [sys.executable, "-c", LETTING_GO],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    held, left, same = told.stdout.split()
    assert int(left) < int(held) - 50 * MB
    assert same == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_what_an_update_frees_is_there_for_the_next_one():
    told = [sys.executable, "-c", ASKING_AGAIN]
    done = subprocess.run(told, cwd=Path(__file__).parents[2], capture_output=True, check=True)
    assert int(done.stdout) < 20 * 8  # not even a page a block, of 586 each


@pytest.mark.skipif(sys.platform != "linux", reason="madvise, and a list of mappings")
def test_what_was_written_to_is_not_let_go_of(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"f" * 4 * PAGE)
    with file.open("r+b") as opened:
        untouched = mmap.mmap(opened.fileno(), 4 * PAGE, flags=mmap.MAP_PRIVATE, prot=READ_ONLY)
        written = mmap.mmap(opened.fileno(), 4 * PAGE, flags=mmap.MAP_PRIVATE)
    written[PAGE] = ord("w")  # as the loader does, before it makes its table read-only
    start = ctypes.addressof(ctypes.c_char.from_buffer(written))
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(start), ctypes.c_size_t(4 * PAGE), READ_ONLY) == 0
    unmap_clean_pages()
    assert written[:] == b"f" * PAGE + b"w" + b"f" * (3 * PAGE - 1)
    assert untouched[:] == b"f" * 4 * PAGE


def test_growth_counts_from_where_the_run_began(clock):
    memory = Memory()
    cleaning = cleaner(clock, memory, min_reclaimable_mb=64.0)
    clock.now += 1000
    memory.rss -= 40 * MB
    cleaning.begin()
    memory.rss += 65 * MB
    cleaning.note("updates", 100)
    assert cleaning.cost.times == 1


@pytest.mark.gpu
def test_cuda_blocks_are_given_back(clock):
    settings = CacheSettings(
        every_updates=1, every_episodes=0, every_rollouts=0, min_reclaimable_mb=64.0
    )
    device = torch.device("cuda", 0)
    cleaning = CacheCleaner(settings, device, Memory(), clock)
    clock.now += 1000  # a run that can afford it
    torch.cuda.empty_cache()
    block = torch.zeros(100 * MB, dtype=torch.uint8, device=device)
    cleaning.note("updates", 1)
    assert cleaning.cost.times == 0
    del block
    held = torch.cuda.memory_reserved(device)
    clock.now += 1
    cleaning.note("updates", 1)
    assert cleaning.cost.times == 1
    assert torch.cuda.memory_reserved(device) <= held - 64 * MB
