"""Compiled updates match eager ones, and machines without a compiler train eagerly."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from changed import changed
from torch._inductor.exc import CppCompileError

from steadyrl.agents.dqn.build import build_loss_spec, init_network
from steadyrl.agents.dqn.noise import UpdateNoise
from steadyrl.agents.engine import inductor
from steadyrl.agents.engine.engine import WORTHWHILE_UPDATES, compile_mode
from steadyrl.agents.engine.inductor import CompiledGraph, reason
from steadyrl.agents.learner.learner import Learner
from steadyrl.buffers.replay.buffer import ReplayBatch
from steadyrl.envs.types import DiscreteActions, EnvSpec
from tests.agents.dqn.test_agent import SETTINGS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("setting", "device", "updates", "mode"),
    [
        ("false", CPU, 10**9, "direct"),
        ("true", CPU, 1, "compiled"),
        ("auto", CPU, WORTHWHILE_UPDATES - 1, "direct"),
        ("auto", CPU, WORTHWHILE_UPDATES, "compiled"),
        ("auto", CUDA, 1, "cudagraph"),
        ("cudagraph", CUDA, 1, "cudagraph"),
        ("cudagraph", CPU, 1, "direct"),
    ],
)
def test_the_mode_follows_setting_device_and_length(setting, device, updates, mode):
    assert compile_mode(setting, device, updates) == mode


def test_large_images_are_not_compiled_on_the_host():
    assert compile_mode("auto", CPU, 10**9, large_images=True) == "direct"
    assert compile_mode("true", CPU, 1, large_images=True) == "compiled"
    assert compile_mode("auto", CUDA, 1, large_images=True) == "cudagraph"


def network(seed, settings, device):
    spec = EnvSpec("Random", 1, (4,), "float32", 1, DiscreteActions(2))
    return init_network(replace(settings, hidden=(24, 16)), spec, device, seed)


def random_batch(n, g):
    return ReplayBatch(
        obs=torch.randn(n, 4, generator=g),
        action=torch.randint(2, (n,), generator=g),
        reward=torch.randn(n, generator=g),
        discount=torch.rand(n, generator=g),
        next_obs=torch.randn(n, 4, generator=g),
        weight=torch.rand(n, generator=g),
        index=torch.arange(n),
    )


def train(mode, updates, device=CPU, **changes):
    """Return the weights and the metrics after some updates on fixed batches."""
    settings = changed(SETTINGS, **changes)
    online, target = (network(seed, settings, device) for seed in (0, 1))
    learner = Learner(build_loss_spec(settings), online, mode, frozen=(target,))
    noise = UpdateNoise(online.module.noise_size, device, seed=2)
    g = torch.Generator().manual_seed(3)
    for i in range(updates):
        drawn = random_batch(settings.batch_size, g)
        batch = ReplayBatch(*(tensor.to(device) for tensor in drawn))
        (td_error,) = learner.step(batch, 1e-3 * (1 - i / updates), *noise.of(i))
    return online.weights, td_error, learner.means().values


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dueling": True, "grad_accumulation": 2, "n_step": 3},
        {"distribution__kind": "c51", "dueling": True},
        {"distribution__kind": "quantile", "munchausen__enabled": True},
        {
            "noisy__enabled": True,
            "distribution__kind": "c51",
            "dueling": True,
            "grad_accumulation": 2,
        },
    ],
)
def test_compiled_updates_match_eager_ones_over_200_updates(changes, caplog):
    for direct, graph in zip(
        train("direct", 200, **changes), train("compiled", 200, **changes), strict=True
    ):
        torch.testing.assert_close(direct, graph, rtol=1e-5, atol=1e-5)
    assert "running eagerly" not in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("noisy", [False, True])
def test_cuda_graph_updates_match_eager_ones(noisy):
    runs = (train(mode, 200, CUDA, noisy__enabled=noisy) for mode in ("direct", "cudagraph"))
    for direct, graph in zip(*runs, strict=True):
        torch.testing.assert_close(direct, graph, rtol=1e-5, atol=1e-5)


WITHOUT_COMPILER = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
import torch
from tests.agents.engine.test_inductor import train
for a, b in zip(train("direct", 5), train("compiled", 5)):
    assert torch.equal(a, b)
print("trained")
"""


@pytest.mark.long
def test_without_a_compiler_training_is_eager_with_one_warning(tmp_path):
    environment = os.environ | {
        "CXX": str(tmp_path / "no-such-compiler"),
        "PATH": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING") == 1
    assert "cannot be compiled here, running eagerly" in done.stdout
    assert done.stdout.splitlines()[-1] == "trained"


def test_the_reason_is_the_compilers_error_without_its_command():
    output = "warning: it is old\n/usr/bin/ld: error: cannot find -ltorch_cpu\ncollect2: error: 1\n"
    failed = CppCompileError(["g++", *(f"-I/include/{each}" for each in range(99))], output)
    assert reason(failed) == "/usr/bin/ld: error: cannot find -ltorch_cpu"
    wrapped = RuntimeError(f"CppCompileError: {failed}")
    assert reason(wrapped) == reason(failed)
    assert reason(OSError("no g++ here")) == "OSError: no g++ here"


def test_captured_tensors_are_graph_inputs():
    # Zeros, which a compiler could fold into the graph as constants.
    shift = torch.zeros(3)

    def add(x, total):
        total.add_(1)
        return x + shift, total.clone()

    graph = CompiledGraph(add, add)
    x, total = torch.ones(3), torch.zeros(())
    assert [t.tolist() for t in graph(x, total)] == [[1.0] * 3, 1.0]
    shift.fill_(2)
    assert [t.tolist() for t in graph(x, total)] == [[3.0] * 3, 2.0]
    assert total.item() == 2.0


@pytest.mark.long
def test_a_function_of_one_output_returns_one_compiled(caplog):
    run = CompiledGraph(lambda x, total: x * 2 + total, pytest.fail)
    x, total = torch.linspace(-1, 1, 3), torch.ones(())
    for _ in range(2):
        assert torch.equal(run(x, total), x * 2 + total)
    assert "running eagerly" not in caplog.text


@pytest.mark.parametrize(
    "error", [AttributeError, TypeError, NotImplementedError, KeyError, OSError]
)
def test_any_compiler_error_falls_back_to_eager_with_one_warning(error, monkeypatch, caplog):
    def fails(*_):
        raise error("of its private parts\nand more")

    monkeypatch.setattr(inductor, "host_code", fails)
    run = CompiledGraph(lambda x: x + 2, torch.exp)
    for _ in range(2):
        assert torch.equal(run(torch.zeros(3)), torch.ones(3))
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "cannot be compiled here, running eagerly" in warning and "\n" not in warning


def test_untraceable_functions_run_eagerly(caplog):
    def scaled(x):
        return torch.addmm(torch.ones(3), x, x, alpha=2.0)

    run = CompiledGraph(scaled, scaled)
    x = torch.arange(9.0).reshape(3, 3)
    for _ in range(2):
        torch.testing.assert_close(run(x), scaled(x))
    assert caplog.text.count("WARNING") == ("running eagerly" in caplog.text)


def test_an_error_in_the_function_is_raised_eagerly(caplog):
    def wrong(x):
        return x.no_such_thing()

    run = CompiledGraph(wrong, wrong)
    for _ in range(2):
        with pytest.raises(AttributeError, match="no_such_thing"):
            run(torch.zeros(3))
    assert caplog.text.count("running eagerly") == 1
