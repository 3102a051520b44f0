"""`auto` is a card only where one works and pays; a card that is asked for by name has to work."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import opened
import pytest
import torch

from steadyrl.agents.registry import Batching
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
    """A machine with a card and a torch for it; what a card answers can be set."""
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
    """Return a job of which nothing is written."""
    return opened.job(Path("nowhere"), *overrides, quick=quick)


def chosen(*overrides):
    of = job(*overrides)
    return choose_device(of.settings.run, of.settings.agent, of.spec)


def test_small_networks_are_left_to_the_cpu_in_a_line_that_names_the_card(machine):
    assert chosen("device=auto") == "cpu"
    (line,) = machine.messages()
    assert "device=cuda" in line and machine.asked == []


@pytest.mark.parametrize(
    "overrides",
    [(LARGE,), ("env=minatar_breakout",), ("agent.compile=cudagraph",), ("precision=tf32",)],
)
def test_large_networks_convolutions_and_wishes_for_a_card_get_one(machine, overrides):
    assert chosen("device=auto", *overrides) == "cuda"
    assert machine.messages() == [] and machine.asked == ["cuda"]


def test_a_card_that_does_not_work_is_left_out_by_auto_in_one_line(machine):
    machine.answer = "RuntimeError: The NVIDIA driver on your system is too old"
    assert chosen("device=auto", LARGE) == "cpu"
    (line,) = machine.messages()
    assert line == f"training on the CPU: the GPU cannot be used ({machine.answer})"


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_card_that_was_asked_for_is_taken_or_refused(machine, device):
    assert chosen(f"device={device}") == device
    machine.answer = "CUDA error: no kernel image is available for execution on the device"
    with pytest.raises(SettingError, match="no kernel image") as refused:
        chosen(f"device={device}")
    assert refused.value.exit_code == 2 and machine.asked == [device] * 2


def test_a_torch_without_cuda_is_named(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(SettingError, match="is built without CUDA") as refused:
        chosen("device=cuda")
    assert refused.value.exit_code == 2
    assert chosen("device=auto", LARGE) == "cpu"
    (line,) = machine.messages()
    assert line.endswith("is built without CUDA")


def test_a_run_keeps_what_was_chosen(machine):
    machine.answer = "broken"
    found = opening.on_device(job("device=auto", LARGE))
    assert found.settings.run.device == "cpu" and found.config["device"] == "auto"


def test_the_probe_runs_in_a_process_of_its_own_and_its_last_line_is_the_reason():
    reason = why_unusable("cuda", SINGLE_PROCESS)  # a machine without a card, or with one
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
def test_whatever_the_probe_does_is_told(monkeypatch, program, reason):
    monkeypatch.setattr(hardware, "PROBE", program)
    assert why_unusable("cuda", SINGLE_PROCESS) == reason


def test_a_card_that_does_not_answer_is_left(monkeypatch):
    monkeypatch.setattr(hardware, "PROBE", "import signal; signal.pause()")
    monkeypatch.setattr(hardware, "PROBE_SECONDS", 0.1)
    assert why_unusable("cuda", SINGLE_PROCESS) == "a test on it did not end within 0.1 s"


def test_each_rank_tries_its_own_card_unless_there_are_too_few(monkeypatch):
    monkeypatch.setattr(hardware, "PROBE", "import sys; sys.exit(sys.argv[1])")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert why_unusable("cuda", RankInfo(5, 8, 1, 2)) == "cuda:1"
    assert why_unusable("cuda", RankInfo(5, 8, 1, 4)) is None


def test_a_card_that_this_process_uses_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(hardware, "PROBE", "import sys; sys.exit('a reason')")
    assert why_unusable("cuda", SINGLE_PROCESS) is None


def test_the_cost_is_that_of_all_weights_for_all_observations():
    settings = job("agent.hidden=[3]", "agent.batch_size=10").settings.agent
    weights = (4 * 3 + 3) + (3 * 2 + 2)
    assert update_cost(settings, VECTOR) == UpdateCost(6 * weights * 10, False)


PPO = ("agent=ppo", "agent.rollout_steps=64", "env.num_envs=2", "agent.minibatches=2")


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_ppo_reads_a_minibatch(recurrent):
    memory = (f"agent.recurrent.cell={recurrent}", "agent.recurrent.sequence_length=16")
    of = job(*PPO, *memory, quick=False)
    assert of.settings.agent.update_batch(of.spec) == 64
    assert update_cost(of.settings.agent, of.spec).flop % (6 * 64) == 0


def test_boxes_and_pictures_have_a_cost_too():
    ppo = job(*PPO, quick=False).settings.agent
    box = replace(VECTOR, action=BoxActions((-1.0, -1.0), (1.0, 1.0)))
    assert update_cost(ppo, box).flop > 0
    picture = replace(VECTOR, frame_shape=(4, 84, 84), dtype="uint8")
    assert update_cost(ppo, picture).convolves


class Foreign:
    """Settings of an algorithm that says nothing more of itself."""

    name = "foreign"


def test_an_algorithm_from_outside_is_weighed_by_its_network(monkeypatch):
    class Agent:
        @classmethod
        def policy(cls, settings, spec, device):
            return torch.nn.Linear(4, 5, device=device), None

    monkeypatch.setattr("steadyrl.agents.update_cost.agent_class", lambda _: Agent)
    assert not isinstance(Foreign(), Batching)
    assert update_cost(Foreign(), VECTOR) == UpdateCost(6 * 25 * UNKNOWN_BATCH, False)
    assert not is_worthwhile(job().settings.run, Foreign(), VECTOR)


@pytest.mark.parametrize(("shape", "convolves"), [((4,), False), ((3, 64, 64), True)])
def test_one_that_cannot_be_built_without_memory_is_judged_by_what_it_sees(
    monkeypatch, shape, convolves
):
    class Agent:
        @classmethod
        def policy(cls, settings, spec, device):
            raise NotImplementedError("cannot copy out of a tensor without numbers")

    monkeypatch.setattr("steadyrl.agents.update_cost.agent_class", lambda _: Agent)
    spec = replace(VECTOR, frame_shape=shape)
    assert update_cost(Foreign(), spec) == UpdateCost(0, convolves)
