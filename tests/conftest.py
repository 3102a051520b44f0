"""What all tests have in common: few threads, usual signals, a limit, the longest tests first."""

import faulthandler
import gc
import logging
import os
import signal
import sys

import pytest
import yaml
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource as InstalledSource,
)
from mapped import unmapping

# On small networks more of them only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run under nohup ignores that its terminal closes, and passes that on to what it starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Where several processes share the tests file by file, these would be what the last one waits for.
# The first two begin together: one has the machine code of most others made, one needs none of it.
LONGEST = (
    "agents/engine/graphs/test_trace.py",
    "test_installed.py",
    "envs/backends/test_containment.py",
    "test_fuzz.py",
    "test_fuzz_more.py",
    "test_growth_of_a_run.py",
    "test_cut_short.py",
    "test_presets.py",
    "test_release.py",
    "test_signals.py",
    "test_evaluate.py",
)

# Files about what STEADYRL_ENGINE=eager switches off; single tests have the marker `machinery`.
MACHINERY = (
    "/agents/engine/cpu/",
    "/agents/engine/graphs/",
    "/agents/engine/test_cuda_graph.py",
    "/agents/engine/test_device_budgets.py",
    "/agents/engine/test_inductor.py",
    "/agents/actors/test_acting_on_the_host.py",
    "/core/gates/",
    "/training/run/test_fused_rollouts.py",
    "/tests/agents/test_trips.py",
)

# Far more than any test takes on a busy machine.
LIMIT_SECONDS, SLOW_LIMIT_SECONDS = 900.0, 6 * 3600.0
TERMINAL = pytest.StashKey[int]()


def pytest_configure(config):
    """Let pytest-xdist hand files out in the order they have; keep where no output is captured."""
    config.option.loadscopereorder = False
    config.stash[TERMINAL] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End the process where a test never ends, whatever it waits for; say where it stood."""
    limit = LIMIT_SECONDS if item.get_closest_marker("slow") is None else SLOW_LIMIT_SECONDS
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[TERMINAL])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items):
    """Begin with what takes longest; leave out what is about machinery that is switched off."""
    items.sort(key=lambda item: place_of(item.path.as_posix()))
    if os.environ.get("STEADYRL_ENGINE") == "eager":
        skip = pytest.mark.skip(reason="STEADYRL_ENGINE=eager: it is about machinery for speed")
        for item in items:
            if is_about_machinery(item):
                item.add_marker(skip)


def is_about_machinery(item):
    """Return whether a test is about compiled graphs, machine code for acting or their speed."""
    if item.get_closest_marker("machinery") is not None:
        return True
    return any(part in item.path.as_posix() for part in MACHINERY)


def place_of(path):
    """Return where a file stands among the longest; the others come after them as they are."""
    return next((i for i, end in enumerate(LONGEST) if path.endswith(f"/{end}")), len(LONGEST))


@pytest.fixture(autouse=True, scope="session")
def configurations_are_read_sooner():
    """Let libyaml read what PyYAML would read a thousand times, to the same values.

    And Hydra look but once for what it finds, or not, among its own installed files.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for name in ("is_config", "is_group"):
            patch.setattr(InstalledSource, name, once_for_each(getattr(InstalledSource, name)))
        yield


def once_for_each(look):
    """Return a method that looks for the same path in the same package but once."""
    known = {}

    def looked(source, path):
        key = (source.path, path)
        if key not in known:
            known[key] = look(source, path)
        return known[key]

    return looked


@pytest.fixture(autouse=True)
def what_was_there_before_is_collected_once():
    """Let collections and censuses look at what a test makes, not at all that others made too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def programs_stay_mapped(monkeypatch):
    """Leave in memory what runs unmap: a run that is over in a moment would only map it again."""
    for module in unmapping():
        monkeypatch.setattr(module, "unmap_clean_pages", lambda: None)


@pytest.fixture(autouse=True)
def what_a_run_sets_is_put_back():
    """Undo what a run in this process did to all of it: hypothesis draws subnormal numbers."""
    yield
    logging.getLogger("steadyrl").setLevel(logging.NOTSET)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_flush_denormal(False)
        torch.set_deterministic_debug_mode("default")
