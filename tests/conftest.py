"""One thread for every test: on small networks more of them only wait for each other."""

import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def small_numbers_stay():
    """Undo what a run in this process did to its arithmetic: hypothesis draws subnormals."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
