import logging
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from command import ROOT

from steadyrl.core.errors import SettingError
from steadyrl.envs.types import DiscreteActions, EnvSpec
from steadyrl.memory import budget
from steadyrl.training.run.hardware import (
    Arithmetic,
    device_name,
    prepare_arithmetic,
    prepare_device,
    thread_count,
)


@pytest.mark.parametrize(
    ("threads", "shape", "count"), [("auto", (4,), 1), (3, (4,), 3), (2, (1, 84, 84), 2)]
)
def test_threads_are_configured_or_one_for_vectors(threads, shape, count):
    spec = EnvSpec("E", 1, shape, "float32", 1, DiscreteActions(2))
    assert thread_count(threads, spec) == count


@pytest.mark.parametrize(("asked", "count"), [(None, 3), ("2", 2), ("8", 3), ("2,1", 2), ("x", 3)])
def test_auto_threads_for_large_images_are_the_usable_cores(monkeypatch, asked, count):
    """OMP_NUM_THREADS allows fewer, as it does in torch."""
    spec = EnvSpec("E", 1, (1, 84, 84), "uint8", 4, DiscreteActions(2))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert thread_count("auto", spec) == count


def test_auto_threads_for_boards_is_one():
    assert thread_count("auto", EnvSpec("E", 1, (4, 10, 10), "uint8", 1, DiscreteActions(2))) == 1


def test_subnormal_numbers_are_flushed_to_zero():
    threads = torch.get_num_threads()
    tiny = torch.full((4,), 2e-38)
    try:
        torch.set_flush_denormal(False)
        assert (tiny * 0.1).count_nonzero() == 4
        prepare_arithmetic(threads)
        assert (tiny * 0.1).count_nonzero() == 0
    finally:
        torch.set_flush_denormal(False)


def test_flushing_subnormals_causes_no_numpy_warning():
    program = (
        "import numpy as np",
        "from steadyrl.training.run.hardware import prepare_arithmetic",
        "prepare_arithmetic(1)",
        "found = [np.finfo(dtype).smallest_subnormal for dtype in ('f2', 'f4', 'f8')]",
    )
    command = [sys.executable, "-W", "error", "-c", "\n".join(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that simulates a number of GPUs."""

    def simulate(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return simulate


@pytest.mark.parametrize(
    ("device", "count", "name"),
    [
        ("auto", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("auto", 2, "cuda"),
        ("cuda", 1, "cuda"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device_name_accepts_a_gpu_index(gpus, device, count, name):
    gpus(count)
    assert device_name(device) == name


@pytest.mark.parametrize(
    ("device", "count", "reason"),
    [
        ("cuda:1", 0, "no CUDA device"),
        ("cuda:1", 1, "no such GPU; there is one, device=cuda"),
        ("cuda:7", 4, "no such GPU; the last one is cuda:3"),
    ],
)
def test_missing_gpus_are_rejected(gpus, device, count, reason):
    gpus(count)
    with pytest.raises(SettingError, match=reason) as refused:
        device_name(device)
    assert refused.value.exit_code == 2


@pytest.fixture
def restore_torch_settings():
    """Restore process-wide settings of torch afterwards."""
    cublas = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [(b, b.allow_tf32) for b in backends]
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = True
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if cublas is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = cublas
    for backend, allowed in before:
        backend.allow_tf32 = allowed
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn


@dataclass
class DeviceSettings:
    precision: str = "float32"
    deterministic: bool = False


def test_precision_and_determinism_configure_the_gpu(restore_torch_settings):
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    for precision, allowed in (("float32", False), ("tf32", True), ("bf16", True)):
        prepare_device(DeviceSettings(precision), torch.device("cuda"))
        assert matmul.allow_tf32 is cudnn.allow_tf32 is allowed
        assert cudnn.benchmark and not cudnn.deterministic
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    prepare_device(DeviceSettings(deterministic=True), torch.device("cuda"))
    assert torch.are_deterministic_algorithms_enabled()
    assert cudnn.deterministic and not cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    prepare_device(DeviceSettings(), torch.device("cuda"))  # a later run in the same process
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_an_environment_changes_is_set_again():
    before = Arithmetic.read()
    try:
        torch.set_num_threads(before.threads + 1)
        torch.set_float32_matmul_precision("medium")
        assert Arithmetic.read() == Arithmetic(before.threads + 1, "medium")
    finally:
        before.restore()
    assert Arithmetic.read() == before


def test_tf32_on_a_cpu_is_warned_of(restore_torch_settings, caplog):
    with caplog.at_level(logging.WARNING, "steadyrl"):
        prepare_device(DeviceSettings("bf16"), torch.device("cpu"))
        assert caplog.messages == []
        prepare_device(DeviceSettings("tf32"), torch.device("cpu"))
    assert caplog.messages == ["precision=tf32 has no effect on a CPU, which multiplies in float32"]


def test_the_memory_plan_includes_the_gpu(monkeypatch):
    bound = budget.Bound("8 GB on cuda:0", 8_000_000_000, 6_000_000_000)
    monkeypatch.setattr(budget, "_cuda_bound", lambda device: bound)
    line = budget.memory_plan({"replay": 5_000_000}, torch.device("cuda:0"))
    assert line.startswith("memory plan: replay 5.00 MB, still available ")
    assert line.endswith(" on the host, 1.90 GB on cuda:0"), line
    assert "cuda" not in budget.memory_plan({}, torch.device("cpu"))
