import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from control_groups import enter, memory_group

from steadyrl.memory.bounds import LOOK_SECONDS, Bounds, read_address_space, read_machine

ROOT = Path(__file__).parents[2]
MB = 1_000_000


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(tmp_path, group, mounted="/"):
    mount = tmp_path / "sys"
    write(tmp_path / "proc/self/cgroup", f"0::{group}\n")
    write(
        tmp_path / "proc/self/mountinfo",
        f"30 23 0:26 {mounted} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
    )
    return mount


def limit(directory, maximum, current, swap=None, high="max", **stat):
    write(directory / "memory.max", f"{maximum}\n")
    write(directory / "memory.high", f"{high}\n")
    write(directory / "memory.current", f"{current}\n")
    lines = [f"{key} {value}\n" for key, value in {"anon": 1, **stat}.items()]
    write(directory / "memory.stat", "".join(lines))
    if swap is not None:
        write(directory / "memory.swap.current", f"{swap}\n")


def groups(tmp_path):
    """Return (limit, used, directory) of each control group's bound."""
    found = Bounds(tmp_path / "proc").read()
    return [(each.limit, each.used, each.group) for each in found if each.group]


def test_a_disk_is_mounted_at_a_name_in_another_encoding(tmp_path):
    mount = v2(tmp_path, "/job")
    limit(mount / "job", 5000, 300)
    mounts = tmp_path / "proc/self/mountinfo"
    before = "31 23 8:17 / /media/Fläche rw - ext4 /dev/sdb1 rw\n".encode("latin-1")
    mounts.write_bytes(before + mounts.read_bytes())
    assert [found[0] for found in groups(tmp_path)] == [5000]


def test_v2_finds_the_limits_of_all_parent_groups(tmp_path):
    mount = v2(tmp_path, "/slice/job")
    limit(mount / "slice", 1000, 900, inactive_file=50)
    limit(mount / "slice/job", 5000, 300)
    assert groups(tmp_path) == [(5000, 300, mount / "slice/job"), (1000, 850, mount / "slice")]
    named = [bound for bound in Bounds(tmp_path / "proc").read() if bound.group]
    assert named[0].name == "cgroup limit 5.00 KB" and named[0].free == 4700


def test_cache_that_is_on_the_disk_is_free_and_swap_is_not(tmp_path):
    mount = v2(tmp_path, "/job")
    stat = {"inactive_file": 100, "active_file": 200, "file_dirty": 30, "file_writeback": 20}
    # "file" has shared memory too, which is on the list of anonymous pages.
    limit(mount / "job", 5000, 2000, swap=700, slab_reclaimable=40, file=400, shmem=100, **stat)
    assert groups(tmp_path) == [(5000, 2000 - (300 - 50 + 40) + 700, mount / "job")]


def test_memory_high_is_a_limit(tmp_path):
    mount = v2(tmp_path, "/job")
    limit(mount / "job", "max", 300, high=900)
    assert groups(tmp_path) == [(900, 300, mount / "job")]


def test_v2_without_a_limit_has_no_bound(tmp_path):
    mount = v2(tmp_path, "/job")
    limit(mount / "job", "max", 300)
    assert groups(tmp_path) == []


def test_v2_in_a_container_finds_the_limit_at_the_root(tmp_path):
    mount = v2(tmp_path, "/")
    limit(mount, 2000, 2500)
    assert groups(tmp_path) == [(2000, 2500, mount)]
    assert next(each for each in Bounds(tmp_path / "proc").read() if each.group).free == 0


def test_v2_group_outside_of_the_mount_uses_the_mounts_limit(tmp_path):
    mount = v2(tmp_path, "/../other")
    limit(mount, 2000, 500)
    assert groups(tmp_path) == [(2000, 500, mount)]


def test_v1_finds_the_limit_in_a_container_with_host_paths(tmp_path):
    mount = tmp_path / "sys/memory"
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x/job\n0::/\n")
    write(
        tmp_path / "proc/self/mountinfo",
        f"31 30 0:27 /docker/x {tmp_path}/sys/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 30 0:28 /docker/x {mount} rw - cgroup cgroup rw,memory\n"
        "garbage\n",
    )
    for directory, top, used in ((mount, 9223372036854771712, 1), (mount / "job", 4000, 1500)):
        write(directory / "memory.limit_in_bytes", f"{top}\n")
        write(directory / "memory.usage_in_bytes", f"{used}\n")
        write(
            directory / "memory.stat",
            "inactive_file 7\ndirty 5\ntotal_swap 60\ntotal_dirty 10\ntotal_writeback 1\n"
            "total_inactive_file 500\ntotal_active_file 100\n",
        )
    assert groups(tmp_path) == [(4000, 1500 - (600 - 11) + 60, mount / "job")]


def test_a_limit_that_is_changed_later_is_followed(tmp_path):
    mount = v2(tmp_path, "/job")
    limit(mount / "job", 5000, 300)
    bounds = Bounds(tmp_path / "proc")
    limit(mount / "job", 2000, 400)
    assert [(each.limit, each.used) for each in bounds.read() if each.group] == [(2000, 400)]
    (mount / "job/memory.current").unlink()  # a group that was removed
    assert [each for each in bounds.read() if each.group] == []


def test_a_limit_that_is_set_later_is_seen(tmp_path, clock):
    mount = v2(tmp_path, "/job")
    limit(mount / "job", "max", 300)
    bounds = Bounds(tmp_path / "proc", clock)
    limit(mount / "job", 2000, 400)
    assert [each for each in bounds.read() if each.group] == []
    clock.now += LOOK_SECONDS
    assert [(each.limit, each.used) for each in bounds.read() if each.group] == [(2000, 400)]


def test_a_system_without_cgroups_has_the_machines_bound_only(tmp_path):
    (bound,) = Bounds(tmp_path / "nowhere").read()  # by psutil
    assert bound.name == "memory of this machine" and bound.shared
    assert bound.limit == psutil.virtual_memory().total


def test_swapped_pages_of_the_run_are_used_memory(tmp_path):
    write(
        tmp_path / "meminfo",
        "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    4000000 kB\n",
    )
    assert read_machine(tmp_path)[:3] == ("memory of this machine", 16_384_000_000, 12_288_000_000)
    assert read_machine(tmp_path, swapped=500).used == 12_288_000_500


def test_the_machines_numbers_are_the_systems():
    found, memory = read_machine(), psutil.virtual_memory()
    assert found.limit == memory.total
    assert found.free == pytest.approx(memory.available, abs=0.02 * memory.total)


def test_the_address_space_counts_what_is_mapped(monkeypatch):
    assert read_address_space() is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, 1 << 40))
    found = read_address_space()
    assert found.used == pytest.approx(psutil.Process().memory_info().vms, rel=0.01)
    assert found.limit == 1 << 40 and not found.shared


GROWS = """
import numpy as np, sys, time
from steadyrl.memory.bounds import Bounds
def used():
    return next(each for each in Bounds().read() if each.group is not None)
start = used()
block = np.ones(50_000_000, np.uint8)
print(start.limit, used().used - start.used)
with open(sys.argv[1], "wb") as file:
    file.write(block)
    file.flush()
    import os; os.fsync(file.fileno())
deadline = time.monotonic() + 10  # the kernel adds up its processors' counters every two seconds
while used().used - start.used > 60_000_000 and time.monotonic() < deadline:
    time.sleep(0.1)
print(start.limit, used().used - start.used)
"""


def test_a_real_group_counts_memory_and_not_written_files(tmp_path):
    with memory_group(400 * MB) as outer:
        inner = outer / "inner"
        inner.mkdir()
        try:
            out = subprocess.run(
                [sys.executable, "-c", GROWS, str(tmp_path / "file")],
                cwd=ROOT,
                capture_output=True,
                text=True,
                preexec_fn=lambda: enter(inner),
            )
        finally:
            inner.rmdir()
    assert out.returncode == 0, out.stderr
    (limit, grown), (_, after) = (map(int, line.split()) for line in out.stdout.splitlines())
    assert limit == pytest.approx(400 * MB, abs=4096)
    assert grown == pytest.approx(50 * MB, abs=4 * MB)
    assert after == pytest.approx(50 * MB, abs=4 * MB)  # the file's 50 MB are cache
