import pytest

from envs.types import DiscreteActions, EnvSpec
from training.hardware import thread_count


@pytest.mark.parametrize(
    ("threads", "shape", "count"), [("auto", (4,), 1), (3, (4,), 3), (2, (1, 84, 84), 2)]
)
def test_threads(threads, shape, count):
    spec = EnvSpec("E", 1, shape, "float32", 1, DiscreteActions(2))
    assert thread_count(threads, spec) == count


def test_convolutions_get_all_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    spec = EnvSpec("E", 1, (1, 84, 84), "uint8", 4, DiscreteActions(2))
    assert thread_count("auto", spec) == 6
