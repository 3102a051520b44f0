"""Of several trainers below one bound, the one that grew most ends first."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from steadyrl.memory.limit.trainers import LastMinuteGrowth, Trainers

MB = 1_000_000
BOUND = "/sys/fs/cgroup/job"


@pytest.fixture
def others(tmp_path):
    """Yield a function that starts a process and publishes growth in its name."""
    started = []

    def start(growth, bound=BOUND, later=0.0, ends=False):
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started.append(process)
        since = psutil.Process(process.pid).create_time() + later
        (tmp_path / f"{process.pid}.json").write_text(
            json.dumps([process.pid, since, bound, growth, ends])
        )
        return process

    yield start
    for process in started:
        process.communicate(b"\n")


def test_a_lone_trainer_ends_first(tmp_path):
    assert Trainers(tmp_path).publish(BOUND, 0) == 0


def test_the_one_that_grew_most_ends_first(tmp_path, others):
    others(300 * MB)
    others(50 * MB)
    trainers = Trainers(tmp_path)
    assert trainers.publish(BOUND, 100 * MB) == pytest.approx(1 / 3)
    assert trainers.publish(BOUND, 500 * MB) == 0
    assert trainers.publish(BOUND, 0) == pytest.approx(2 / 3)


def test_of_a_tie_the_youngest_ends_first(tmp_path, others):
    others(100 * MB)  # started after this process
    assert Trainers(tmp_path).publish(BOUND, 101 * MB) == 0.5


def test_while_one_ends_the_others_go_on(tmp_path, others):
    others(10 * MB, ends=True)
    assert Trainers(tmp_path).publish(BOUND, 500 * MB) == 1


def test_trainers_of_another_bound_do_not_count(tmp_path, others):
    others(300 * MB, bound="/sys/fs/cgroup/other")
    assert Trainers(tmp_path).publish(BOUND, 0) == 0


def test_a_killed_trainer_is_forgotten(tmp_path, others):
    process = others(300 * MB)
    process.kill()
    process.wait()
    assert Trainers(tmp_path).publish(BOUND, 0) == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}.json"]


def test_another_process_with_the_number_of_a_killed_one_is_no_trainer(tmp_path, others):
    others(300 * MB, later=-100.0)
    assert Trainers(tmp_path).publish(BOUND, 0) == 0


def test_a_broken_file_is_ignored(tmp_path):
    (tmp_path / "1.json").write_text("{")
    assert Trainers(tmp_path).publish(BOUND, 0) == 0
    assert (tmp_path / "1.json").exists()  # another version's, which may need it


def test_a_closed_trainer_leaves_no_file(tmp_path):
    trainers = Trainers(tmp_path)
    trainers.publish(BOUND, 0)
    trainers.close()
    trainers.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
    tmp_path.chmod(0o777)
    assert Trainers(tmp_path).publish(BOUND, 0) == 0
    assert list(tmp_path.iterdir()) == []


def test_growth_is_that_of_the_last_minute():
    growth = LastMinuteGrowth(started=0.0)
    assert growth.add(1.0, 100) == 100  # a young process grew by all it holds
    assert growth.add(30.0, 100) == 100
    assert growth.add(70.0, 150) == 50
    assert growth.add(200.0, 150) == 0
