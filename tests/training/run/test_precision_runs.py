"""Runs with other precisions, deterministic runs, and runs out of memory."""

import json

import pytest
import torch
from opened import job

from steadyrl.agents.dqn.agent import DQN
from steadyrl.core.errors import MemoryBudgetError, SettingError
from steadyrl.loop import train
from steadyrl.training.cli.failures import one_line_errors

PPO = ("agent=ppo", "agent.hidden=[16]", "agent.rollout_steps=32", "agent.compile=false")
OF_PPO = (*PPO, "agent.epochs=2", "env=cartpole", "device=cpu", "eval.every=0", "log.every=0")
SHORT = ("total_steps=600", "eval.every=0", "log.every=0")


def summary(folder, *overrides, quick=True):
    train(job(folder, *overrides, quick=quick))
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("overrides", "quick"), [(SHORT, True), ((*OF_PPO, "total_steps=100"), False)]
)
def test_on_a_cpu_only_bf16_changes_the_weights(tmp_path, overrides, quick):
    changes = {
        "plain": (),
        "tf32": ("precision=tf32", "deterministic=true"),
        "bf16": ("precision=bf16",),
    }
    found = {}
    for name, more in changes.items():
        (tmp_path / name).mkdir()
        result = summary(tmp_path / name, *overrides, *more, quick=quick)
        assert result["status"] == "finished" and result["updates"] > 9
        found[name] = result["weights_sha256"]
    assert found["plain"] == found["tf32"] != found["bf16"]


def test_bf16_runs_resume_exactly_and_may_switch_to_float32(tmp_path, none_left_out):
    overrides = ("precision=bf16", "checkpoint.every=300", "checkpoint.keep=9", *SHORT)
    uninterrupted = summary(tmp_path, *overrides)
    found = tmp_path / "run" / "checkpoints"
    for checkpoint in found.iterdir():
        if checkpoint.name > "step-000000000300":
            for file in checkpoint.iterdir():
                file.unlink()
            checkpoint.rmdir()
    assert max(path.name for path in found.iterdir()) == "step-000000000300"
    resumed = summary(tmp_path, f"resume={tmp_path / 'run'}", quick=False)
    assert resumed["resumed_from_step"] == 300
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]
    further = (f"resume={tmp_path / 'run'}", "total_steps=700", "precision=float32")
    assert summary(tmp_path, *further, quick=False)["steps"] == 700
    assert "with precision=float32 (was bf16)" in (tmp_path / "run" / "train.log").read_text()


def error_of(run):
    with pytest.raises(Exception) as raised, one_line_errors(run):
        train(run)
    return raised.value


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("agent.replay.capacity=4e15",), "MemoryError"),  # from NumPy
        (
            (*PPO, "agent.rollout_steps=1e14", "total_steps=1e18"),
            "DefaultCPUAllocator",
        ),  # from torch
    ],
)
def test_failed_allocations_end_with_7_and_the_memory_plan(tmp_path, monkeypatch, overrides, what):
    for module in ("steadyrl.memory.budget", "steadyrl.buffers.replay.placement"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda device=None: 1 << 62)
    error = error_of(job(tmp_path, *overrides, "eval.every=0", quick=what == "MemoryError"))
    assert isinstance(error, MemoryBudgetError) and error.exit_code == 7
    assert str(error).startswith("out of memory (")
    assert what in str(error) or "allocate" in str(error)
    assert "memory plan: available " in str(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_cuda_out_of_memory_during_a_run_ends_with_7(tmp_path, monkeypatch, error):
    def full(self):
        raise error

    monkeypatch.setattr(DQN, "update", full)
    error_ = error_of(job(tmp_path, *SHORT))
    assert error_.exit_code == 7
    assert "memory plan" in str(error_) and "\n" not in str(error_)
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result["status"] == "failed"


def test_nondeterministic_operations_are_rejected_by_their_setting(tmp_path, monkeypatch):
    def nondeterministic_update(self):
        raise RuntimeError(
            "max_pool2d_with_indices_backward_cuda does not have a deterministic implementation, "
            "but you set 'torch.use_deterministic_algorithms(True)'"
        )

    monkeypatch.setattr(DQN, "update", nondeterministic_update)
    error_ = error_of(job(tmp_path, *SHORT, "deterministic=true"))
    assert isinstance(error_, SettingError) and error_.field == "deterministic"
    assert "max_pool2d" in str(error_)
