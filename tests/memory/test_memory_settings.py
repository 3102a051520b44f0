import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from steadyrl.core.errors import SettingError
from steadyrl.memory.settings import (
    CacheSettings,
    LeakSettings,
    MemorySettings,
    MonitorSettings,
    SlowdownSettings,
)

ROOT = Path(__file__).parents[2]


def default_settings():
    plain = yaml.safe_load((ROOT / "configs/memory/default.yaml").read_text())
    return MemorySettings(
        **{
            **plain,
            "monitor": MonitorSettings(**plain["monitor"]),
            "cache": CacheSettings(**plain["cache"]),
            "leak": LeakSettings(**plain["leak"]),
            "slowdown": SlowdownSettings(**plain["slowdown"]),
        }
    )


def test_default_settings_are_the_documented_ones():
    settings = default_settings()
    assert (settings.history, settings.step_times, settings.collect_times) == (1000, 100, 20)
    cache = settings.cache
    assert (cache.every_updates, cache.every_episodes, cache.every_rollouts) == (100, 10, 100)
    assert settings.leak.action == "warn" and settings.limit_mb == "auto"


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        (None, "history", 0),
        (None, "history", 100_001),  # a checkpoint of more could not be read back
        (None, "mean_window", 0),
        (None, "mean_window", 1001),  # more than are kept
        (None, "step_times", 0),
        (None, "collect_times", -1),
        (None, "limit_mb", 0.0),
        (None, "limit_mb", math.inf),
        ("monitor", "tree_every_seconds", -1.0),
        ("monitor", "tensors_every_seconds", math.nan),
        ("cache", "every_updates", -1),
        ("cache", "every_episodes", -1),
        ("cache", "every_rollouts", -1),
        ("cache", "min_reclaimable_mb", math.nan),
        ("monitor", "every_seconds", -1.0),
        ("leak", "warmup_samples", 0),
        ("leak", "window_samples", 3),
        ("leak", "max_growth_mb", -0.5),
        ("leak", "max_growth_mb_per_million_steps", math.nan),
        ("leak", "max_extra_handles", -1),
        ("slowdown", "max_percent", -1.0),
        ("slowdown", "max_percent", 100.0),
        ("slowdown", "max_percent", math.nan),
        ("slowdown", "warmup_samples", -1),
        ("slowdown", "window_samples", 3),
    ],
)
def test_values_out_of_range_are_rejected_by_name(part, field, value):
    settings = default_settings()
    target = settings if part is None else getattr(settings, part)
    with pytest.raises(SettingError, match=field) as caught:
        replace(target, **{field: value})
    assert caught.value.field == field and caught.value.exit_code == 2


def test_importing_the_settings_loads_no_heavy_modules():
    code = (
        "import sys; import steadyrl.memory.settings; "
        "print(sorted({'torch', 'numpy', 'psutil', 'gymnasium', 'numba'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
