import pytest
import torch

from envs.types import DiscreteActions, EnvSpec
from training.hardware import prepare_arithmetic, thread_count


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


def test_numbers_that_slow_a_cpu_down_count_as_zero():
    threads = torch.get_num_threads()
    tiny = torch.full((4,), 2e-38)
    try:
        torch.set_flush_denormal(False)
        assert (tiny * 0.1).count_nonzero() == 4
        prepare_arithmetic(threads)
        assert (tiny * 0.1).count_nonzero() == 0
    finally:
        torch.set_flush_denormal(False)
