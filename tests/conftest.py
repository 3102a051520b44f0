"""Common to all tests: one thread, default signals, a time limit, longest files first."""

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
from hypothesis import HealthCheck, settings
from mapped import unmapping
from outside_package import installed  # noqa: F401  (a fixture)

# Small networks gain nothing from more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a loaded machine drawing examples and running them may take long.
settings.register_profile(
    "loaded", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("loaded")

# Under nohup SIGHUP is ignored, and child processes inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Files of ten seconds or more that come late in the order of names: pytest-xdist, which distributes
# files, would wait for the last of them at the end.
# Two start together, of which one compiles most kernels and the other needs none: of the long tests
# the first two, of the others the fourth and the third.
LONGEST = (
    "agents/engine/graphs/test_trace.py",
    "test_installed.py",
    "envs/backends/test_containment.py",
    "test_presets.py",
    "test_every_backend.py",
    "test_sweep_goes_on.py",
    "tests/test_api.py",
    "test_fuzz.py",
    "test_fuzz_more.py",
    "tests/test_resume.py",
    "test_growth_of_a_run.py",
    "test_cut_short.py",
    "run/test_signals.py",
    "test_release.py",
    "test_ranks_end.py",
    "test_batch_runs.py",
    "tests/test_train.py",
    "test_callbacks.py",
    "tests/test_architecture.py",
    "test_bad_input.py",
    "config/hints/test_hints.py",
    "test_live_phases.py",
    "test_slow_steps.py",
    "test_archive.py",
    "test_budget_of_a_run.py",
    "cli/test_plot.py",
    "cli/test_evaluate.py",
    "test_resume_checkpoint.py",
    "test_every_checkpoint.py",
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

# Far more than any test takes on a busy machine; two of them fit into what CI gives all tests.
LIMIT_SECONDS, SLOW_LIMIT_SECONDS = 400.0, 6 * 3600.0
TERMINAL = pytest.StashKey[int]()


def pytest_configure(config):
    """Make pytest-xdist keep the order of files; keep a copy of the uncaptured stderr."""
    config.option.loadscopereorder = False
    config.stash[TERMINAL] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End the process with a traceback when a test exceeds its time limit."""
    slow = item.get_closest_marker("slow") is not None or "STEADYRL_FUZZ" in os.environ
    limit = SLOW_LIMIT_SECONDS if slow else LIMIT_SECONDS
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[TERMINAL])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items):
    """Run the longest files first; leave out tests of machinery that is switched off."""
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
    """Return a file's rank among the longest; other files come after them."""
    return next((i for i, end in enumerate(LONGEST) if path.endswith(f"/{end}")), len(LONGEST))


@pytest.fixture(autouse=True, scope="session")
def fast_yaml_and_hydra():
    """Parse YAML with libyaml, which gives the same values faster.

    Cache Hydra's look-ups among its installed files.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for name in ("is_config", "is_group"):
            patch.setattr(InstalledSource, name, cached_per_path(getattr(InstalledSource, name)))
        yield


def cached_per_path(lookup):
    """Cache a method's result per package and path."""
    known = {}

    def cached(source, path):
        key = (source.path, path)
        if key not in known:
            known[key] = lookup(source, path)
        return known[key]

    return cached


@pytest.fixture(autouse=True)
def freeze_existing_objects():
    """Freeze existing objects, so that a test's collections and censuses see only its own."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def programs_stay_mapped(monkeypatch):
    """Disable unmapping of clean pages, which short runs would only map again."""
    for module in unmapping():
        monkeypatch.setattr(module, "unmap_clean_pages", lambda: None)


@pytest.fixture(autouse=True)
def restore_process_settings():
    """Undo process-wide settings of runs; hypothesis draws subnormal numbers."""
    yield
    logging.getLogger("steadyrl").setLevel(logging.NOTSET)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_flush_denormal(False)
        torch.set_deterministic_debug_mode("default")
