import pytest

from envs.types import DiscreteActions, EnvSpec
from training.hardware import thread_count


@pytest.mark.parametrize(
    ("threads", "shape", "count"), [("auto", (4,), 1), (3, (4,), 3), (2, (1, 84, 84), 2)]
)
def test_threads(threads, shape, count):
    spec = EnvSpec("E", 1, shape, "float32", 1, DiscreteActions(2))
    assert thread_count(threads, spec) == count


def test_large_images_get_the_cores_this_process_may_use(monkeypatch):
    spec = EnvSpec("E", 1, (1, 84, 84), "uint8", 4, DiscreteActions(2))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    assert thread_count("auto", spec) == 3


def test_boards_are_too_small_to_share():
    assert thread_count("auto", EnvSpec("E", 1, (4, 10, 10), "uint8", 1, DiscreteActions(2))) == 1
