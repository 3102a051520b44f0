"""The processor's times are read from made-up trees of files, and from this machine."""

import sys

import pytest

from steadyrl.training.speed.processor import read_processor


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_waiting_throttling_and_clock_rate_are_read(tmp_path):
    proc, sys_ = tmp_path / "proc", tmp_path / "sys"
    write(proc / "thread-self/schedstat", "5000000000 1500000000 77\n")
    write(proc / "self/cgroup", "0::/slice/job\n")
    write(sys_ / "fs/cgroup/slice/cpu.stat", "usage_usec 9\nthrottled_usec 2500000\n")
    write(sys_ / "fs/cgroup/slice/job/cpu.stat", "usage_usec 5\nnr_throttled 0\nthrottled_usec 0\n")
    for core in range(256):
        write(sys_ / f"devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", "2400000\n")
    found = read_processor(proc, sys_)
    assert found[1:] == (1.5, 2.5, 2400.0) and found.cpu > 0


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_version_1_of_control_groups(tmp_path, folder):
    write(tmp_path / "proc/self/cgroup", f"4:memory:/a\n3:{folder}:/a\n")
    write(
        tmp_path / f"sys/fs/cgroup/{folder}/a/cpu.stat",
        "nr_throttled 3\nthrottled_time 3000000000\n",
    )
    assert read_processor(tmp_path / "proc", tmp_path / "sys").throttled == 3.0


def test_what_the_system_does_not_tell_is_unknown(tmp_path):
    assert read_processor(tmp_path, tmp_path)[1:] == (None, None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_can_be_read():
    found = read_processor()
    assert found.cpu > 0 and (found.waited is None or found.waited >= 0)
