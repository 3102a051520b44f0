"""Fixture: a memory limit with a made-up meter and clock."""

import pytest
from watched_limit import Watched


@pytest.fixture
def watched(clock, tmp_path):
    return Watched(clock, tmp_path / "trainers")
