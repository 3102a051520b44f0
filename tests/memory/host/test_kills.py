from pathlib import PurePosixPath

import pytest

from steadyrl.memory.host.kills import kernel_kills


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path):
    """Return a function that makes the files of a process in a group, and the group's path."""

    def make(kind, group="/slice/job"):
        mount = tmp_path / "sys"
        controller, after = ("", "cgroup2 cgroup2 rw")
        if kind == 1:
            controller, after = "memory", "cgroup cgroup rw,memory"
        write(tmp_path / "self/cgroup", f"0:{controller}:{group}\n")
        write(tmp_path / "self/mountinfo", f"30 23 0:26 / {mount} rw - {after}\n")
        return mount / PurePosixPath(group).relative_to("/")

    return make


EVENTS = "low 0\nhigh 3\nmax 41\noom 2\noom_kill {}\noom_group_kill 0\n"


def test_kills_of_the_own_group_are_counted(tree, tmp_path):
    job = tree(2)
    write(job / "memory.events", EVENTS.format(2))
    write(job.parent / "memory.events", EVENTS.format(7))  # others' too
    write(tmp_path / "vmstat", "oom_kill 9\n")
    assert kernel_kills(tmp_path) == 2


def test_a_group_without_the_controller_is_counted_by_its_parent(tree, tmp_path):
    job = tree(2)
    write(job.parent / "memory.events", EVENTS.format(7))
    assert kernel_kills(tmp_path) == 7


def test_version_1_counts_in_another_file(tree, tmp_path):
    job = tree(1)
    write(job / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert kernel_kills(tmp_path) == 5


def test_old_kernels_tell_only_that_memory_is_out(tree, tmp_path):
    job = tree(1)
    write(job / "memory.oom_control", "oom_kill_disable 0\nunder_oom 1\n")
    assert kernel_kills(tmp_path) == 1


def test_without_groups_the_machine_counts(tree, tmp_path):
    tree(2, "/")
    write(tmp_path / "vmstat", "nr_free_pages 12\noom_kill 4\n")
    assert kernel_kills(tmp_path) == 4


def test_unreadable_files_count_nothing(tmp_path):
    assert kernel_kills(tmp_path) == 0
