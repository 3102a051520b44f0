"""One thread for every test: on small networks more of them only wait for each other."""

import logging
import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def what_a_run_sets_is_put_back():
    """Undo what a run in this process did to all of it: hypothesis draws subnormal numbers."""
    yield
    logging.getLogger("steadyrl").setLevel(logging.NOTSET)
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
