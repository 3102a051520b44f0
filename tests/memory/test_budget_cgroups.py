from steadyrl.memory.budget import Bound, cgroup_bounds


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(tmp_path, group, mounted="/"):
    mount = tmp_path / "sys"
    write(tmp_path / "proc/cgroup", f"0::{group}\n")
    write(
        tmp_path / "proc/mountinfo",
        f"30 23 0:26 {mounted} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
    )
    return mount


def limit(directory, maximum, current, inactive=0):
    write(directory / "memory.max", f"{maximum}\n")
    write(directory / "memory.current", f"{current}\n")
    write(directory / "memory.stat", f"anon 1\ninactive_file {inactive}\n")


def test_v2_finds_the_limits_of_all_parent_groups(tmp_path):
    mount = v2(tmp_path, "/slice/job")
    limit(mount / "slice", 1000, 900, inactive=50)
    limit(mount / "slice/job", 5000, 300)
    assert list(cgroup_bounds(tmp_path / "proc")) == [
        Bound("cgroup limit 5.00 KB", 4700),
        Bound("cgroup limit 1.00 KB", 150),
    ]


def test_v2_without_a_limit_has_no_bound(tmp_path):
    mount = v2(tmp_path, "/job")
    limit(mount / "job", "max", 300)
    assert list(cgroup_bounds(tmp_path / "proc")) == []


def test_v2_in_a_container_finds_the_limit_at_the_root(tmp_path):
    mount = v2(tmp_path, "/")
    limit(mount, 2000, 2500)
    assert list(cgroup_bounds(tmp_path / "proc")) == [Bound("cgroup limit 2.00 KB", 0)]


def test_v2_group_outside_of_the_mount_uses_the_mounts_limit(tmp_path):
    mount = v2(tmp_path, "/../other")
    limit(mount, 2000, 500)
    assert list(cgroup_bounds(tmp_path / "proc")) == [Bound("cgroup limit 2.00 KB", 1500)]


def test_v1_finds_the_limit_in_a_container_with_host_paths(tmp_path):
    mount = tmp_path / "sys/memory"
    write(tmp_path / "proc/cgroup", "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x/job\n0::/\n")
    write(
        tmp_path / "proc/mountinfo",
        f"31 30 0:27 /docker/x {tmp_path}/sys/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 30 0:28 /docker/x {mount} rw - cgroup cgroup rw,memory\n"
        "garbage\n",
    )
    for directory, top, used in ((mount, 9223372036854771712, 1), (mount / "job", 4000, 1500)):
        write(directory / "memory.limit_in_bytes", f"{top}\n")
        write(directory / "memory.usage_in_bytes", f"{used}\n")
        write(directory / "memory.stat", "inactive_file 7\ntotal_inactive_file 500\n")
    assert list(cgroup_bounds(tmp_path / "proc")) == [Bound("cgroup limit 4.00 KB", 3000)]


def test_a_system_without_cgroups_has_no_bound(tmp_path):
    assert list(cgroup_bounds(tmp_path / "nowhere")) == []
