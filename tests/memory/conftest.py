from dataclasses import replace

import psutil
import pytest
import yaml

from steadyrl.memory.settings import (
    CacheSettings,
    LeakSettings,
    MemorySettings,
    MonitorSettings,
    SlowdownSettings,
)


@pytest.fixture
def programs_stay_mapped():
    """Override: let runs unmap clean pages of programs, as these tests measure their memory."""


@pytest.fixture(scope="session")
def settings(request):
    """Return the default settings."""
    plain = yaml.safe_load((request.config.rootpath / "configs/memory/default.yaml").read_text())
    return MemorySettings(
        **{
            **plain,
            "monitor": MonitorSettings(**plain["monitor"]),
            "cache": CacheSettings(**plain["cache"]),
            "leak": LeakSettings(**plain["leak"]),
            "slowdown": SlowdownSettings(**plain["slowdown"]),
        }
    )


@pytest.fixture(scope="session")
def alert_settings(settings):
    """Return settings that measure at every call and report leaks of a few MB in a few samples."""
    return replace(
        settings,
        monitor=MonitorSettings(every_seconds=0, tree_every_seconds=0, tensors_every_seconds=0),
        leak=replace(
            settings.leak,
            warmup_samples=3,
            window_samples=30,
            max_growth_mb=8,
            max_extra_handles=3,
        ),
    )


@pytest.fixture
def process():
    return psutil.Process()


class Clock:
    """Clock that tests advance."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()
