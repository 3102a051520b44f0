"""A card's use by all processes, as NVML gives it."""

import os
from importlib.util import find_spec

import pytest
import torch

from steadyrl.memory.gpu.usage import CardUsage, read_usage
from steadyrl.memory.watch import MemoryWatch

CARD = torch.device("cuda", 0)
TAGS = {"memory/cuda_used_mb", "memory/cuda_utilization_percent"}


def test_each_number_is_left_out_where_it_cannot_be_read(monkeypatch):
    class NVMLError(Exception):
        """As pynvml's, which derives from nothing else."""

    def fail(device):
        raise NVMLError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 5_000_000)
    assert read_usage(CARD) == CardUsage(None, 5_000_000)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 42)
    monkeypatch.setattr(torch.cuda, "device_memory_used", fail)
    assert read_usage(CARD) == CardUsage(42, None)


@pytest.mark.gpu
def test_a_run_s_metrics_have_what_nvml_knows(alert_settings):
    if find_spec("pynvml") is None:
        pytest.skip("the extra gpu is not installed")
    held = torch.zeros(50_000_000, dtype=torch.uint8, device=CARD)
    watch = MemoryWatch(alert_settings, CARD)
    scalars = watch.measure(0)
    watch.close()
    usage = read_usage(CARD)
    expected = {tag for tag, n in zip(sorted(TAGS), reversed(usage), strict=True) if n is not None}
    assert scalars.keys() & TAGS == expected and "memory/cuda_used_mb" in expected
    assert scalars["memory/cuda_used_mb"] >= held.numel() / 1e6
    assert 0 <= scalars.get("memory/cuda_utilization_percent", 0) <= 100
    given = os.environ.get("FAKE_UTILIZATION")  # of the emulated card, which knows none otherwise
    assert given is None or scalars["memory/cuda_utilization_percent"] == float(given)
