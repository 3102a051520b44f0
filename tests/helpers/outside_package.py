"""The package of `tests/outside_algorithm`, which has two algorithms of its own."""

import sys

import pytest
from command import ROOT
from hydra.core.config_store import ConfigStore

OUTSIDE = ROOT / "tests" / "outside_algorithm"


@pytest.fixture
def installed(monkeypatch):
    """Put the outside package on the path; remove its modules afterwards."""
    monkeypatch.syspath_prepend(str(OUTSIDE))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "outside"]:
        del sys.modules[name]
    ConfigStore.instance().repo.get("agent", {}).clear()
