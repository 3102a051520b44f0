"""Choice of the device: `auto` uses a GPU that works and pays off; a named GPU must work."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import opened
import pytest
import torch

from steadyrl.agents.registry import HasBatchSize
from steadyrl.agents.update_cost import UNKNOWN_BATCH, UpdateCost, update_cost
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import BoxActions, DiscreteActions, EnvSpec
from steadyrl.training import setup as opening
from steadyrl.training.run import hardware
from steadyrl.training.run.hardware import choose_device, is_worthwhile, why_unusable
from steadyrl.training.run.rank_info import RankInfo

VECTOR = EnvSpec("Vectors", 1, (4,), "float32", 1, DiscreteActions(2))
LARGE = "agent.hidden=[1024,1024]"
SINGLE_PROCESS = RankInfo()


@pytest.fixture
def machine(monkeypatch, caplog):
    """Simulate a machine with GPUs; `answer` is the probe's error, if any."""
    found = SimpleNamespace(answer=None, asked=[], messages=lambda: caplog.messages)

    def why(name, here):
        found.asked.append(name)
        return found.answer

    caplog.set_level(logging.INFO, "steadyrl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(hardware, "why_unusable", why)
    monkeypatch.setattr(hardware, "has_driver", lambda: True)
    return found


def job(*overrides, quick=True):
    """Return a job that writes no files."""
    return opened.job(Path("nowhere"), *overrides, quick=quick)


def chosen(*overrides):
    job_ = job(*overrides)
    return choose_device(job_.settings.run, job_.settings.agent, job_.spec)


def test_auto_trains_small_networks_on_the_cpu_and_says_so(machine):
    assert chosen("device=auto") == "cpu"
    (line,) = machine.messages()
    assert "device=cuda" in line and machine.asked == []


@pytest.mark.parametrize(
    "overrides",
    [(LARGE,), ("env=minatar_breakout",), ("agent.compile=cudagraph",), ("precision=tf32",)],
)
def test_auto_uses_the_gpu_for_large_networks_and_gpu_settings(machine, overrides):
    assert chosen("device=auto", *overrides) == "cuda"
    assert machine.messages() == [] and machine.asked == ["cuda"]


def test_auto_falls_back_to_the_cpu_with_one_line(machine):
    machine.answer = "RuntimeError: The NVIDIA driver on your system is too old"
    assert chosen("device=auto", LARGE) == "cpu"
    (line,) = machine.messages()
    assert line == f"training on the CPU: the GPU cannot be used ({machine.answer})"


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_named_gpu_is_used_or_rejected(machine, device):
    assert chosen(f"device={device}") == device
    machine.answer = "CUDA error: no kernel image is available for execution on the device"
    with pytest.raises(SettingError, match="no kernel image") as refused:
        chosen(f"device={device}")
    assert refused.value.exit_code == 2 and machine.asked == [device] * 2


def test_a_cpu_build_of_torch_is_named(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(SettingError, match="is built without CUDA") as refused:
        chosen("device=cuda")
    assert refused.value.exit_code == 2
    assert chosen("device=auto", LARGE) == "cpu"
    (line,) = machine.messages()
    assert line.endswith("is built without CUDA")


def test_the_chosen_device_is_kept_beside_the_configured_auto(machine):
    machine.answer = "broken"
    with opening.on_device(job("device=auto", LARGE)) as found:
        assert found.settings.run.device == "cpu" and found.config["device"] == "auto"


def test_the_gpu_is_probed_in_a_subprocess():
    reason = why_unusable("cuda", SINGLE_PROCESS)  # on machines with and without a GPU
    assert (reason is None) is (torch.cuda.is_available())
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pass", None),
        ("import sys; print('a remark', file=sys.stderr); sys.exit('a reason')", "a reason"),
        ("import os; os._exit(3)", "a test on it exited with 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "a test on it exited with -9"),
        ("import sys; sys.exit(sys.argv[1])", "cuda"),
    ],
)
def test_the_probes_outcome_is_the_reason(monkeypatch, program, reason):
    monkeypatch.setattr(hardware, "PROBE", program)
    assert why_unusable("cuda", SINGLE_PROCESS) == reason


def test_a_hanging_probe_is_abandoned(monkeypatch):
    monkeypatch.setattr(hardware, "PROBE", "import signal; signal.pause()")
    monkeypatch.setattr(hardware, "PROBE_SECONDS", 0.1)
    assert why_unusable("cuda", SINGLE_PROCESS) == "a test on it did not end within 0.1 s"


def test_each_rank_probes_its_own_gpu_unless_too_few(monkeypatch):
    monkeypatch.setattr(hardware, "PROBE", "import sys; sys.exit(sys.argv[1])")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert why_unusable("cuda", RankInfo(5, 8, 1, 2)) == "cuda:1"
    assert why_unusable("cuda", RankInfo(5, 8, 1, 4)) is None


def test_a_gpu_in_use_by_this_process_is_not_probed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(hardware, "PROBE", "import sys; sys.exit('a reason')")
    assert why_unusable("cuda", SINGLE_PROCESS) is None


def test_update_cost_counts_weights_times_batch_size():
    settings = job("agent.hidden=[3]", "agent.batch_size=10").settings.agent
    weights = (4 * 3 + 3) + (3 * 2 + 2)
    assert update_cost(settings, VECTOR) == UpdateCost(6 * weights * 10, False)


PPO = ("agent=ppo", "agent.rollout_steps=64", "env.num_envs=2", "agent.minibatches=2")


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_the_update_batch_of_ppo_is_a_minibatch(recurrent):
    memory = (f"agent.recurrent.cell={recurrent}", "agent.recurrent.sequence_length=16")
    job_ = job(*PPO, *memory, quick=False)
    assert job_.settings.agent.update_batch(job_.spec) == 64
    assert update_cost(job_.settings.agent, job_.spec).flop % (6 * 64) == 0


def test_update_cost_covers_box_actions_and_images():
    ppo = job(*PPO, quick=False).settings.agent
    box = replace(VECTOR, action=BoxActions((-1.0, -1.0), (1.0, 1.0)))
    assert update_cost(ppo, box).flop > 0
    picture = replace(VECTOR, frame_shape=(4, 84, 84), dtype="uint8")
    assert update_cost(ppo, picture).convolves


class Foreign:
    """Settings of an algorithm without optional capabilities."""

    name = "foreign"


def test_update_cost_of_an_outside_algorithm_uses_its_network(monkeypatch):
    class Agent:
        @classmethod
        def policy(cls, settings, spec, device):
            return torch.nn.Linear(4, 5, device=device), None

    monkeypatch.setattr("steadyrl.agents.update_cost.agent_class", lambda _: Agent)
    assert not isinstance(Foreign(), HasBatchSize)
    assert update_cost(Foreign(), VECTOR) == UpdateCost(6 * 25 * UNKNOWN_BATCH, False)
    assert not is_worthwhile(job().settings.run, Foreign(), VECTOR)


@pytest.mark.parametrize(("shape", "convolves"), [((4,), False), ((3, 64, 64), True)])
def test_update_cost_without_a_meta_network_uses_the_observations(monkeypatch, shape, convolves):
    class Agent:
        @classmethod
        def policy(cls, settings, spec, device):
            raise NotImplementedError("cannot copy out of a tensor without numbers")

    monkeypatch.setattr("steadyrl.agents.update_cost.agent_class", lambda _: Agent)
    spec = replace(VECTOR, frame_shape=shape)
    assert update_cost(Foreign(), spec) == UpdateCost(0, convolves)
