"""`scripts/checkpoint.py`: list, show, verify and export."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from opened import job
from safetensors import safe_open

from steadyrl.agents.registry import finished_policy
from steadyrl.loop import train
from steadyrl.training.cli.checkpoint import main
from steadyrl.training.policies.policy import (
    agent_settings,
    build_policy_module,
    read_policy,
    spec_of,
)

PPO = ("agent=ppo", "env=pendulum", "agent.rollout_steps=16", "agent.minibatches=2",
       "total_steps=64", "eval.every=32", "eval.episodes=1", "eval.max_episode_steps=20",
       "agent.normalize_obs=true", "agent.compile=false", "agent.hidden=[8]", "device=cpu",
       "env.num_envs=2")  # fmt: skip


@pytest.fixture(scope="module")
def dqn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dqn")
    train(job(folder, "total_steps=300", "eval.every=150", "checkpoint.every=100"))
    return folder / "run"


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    train(job(folder, *PPO, quick=False))
    return folder / "run"


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main([str(each) for each in arguments])
    return capsys.readouterr().out


def error_of(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 3, lines: int = 1
) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    assert ended.value.code == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == lines
    return error


def test_list_show_and_verify_describe_checkpoints(
    dqn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = printed(capsys, "list", dqn)
    assert "| step-000000000300 | 300 |" in listed
    assert "| policy-best |" in listed
    text = printed(capsys, "show", dqn)
    assert 'agent: "dqn"' in text
    assert "config.agent.hidden: [16]" in text
    assert set(printed(capsys, "verify", dqn).split()[1::2]) == {"valid"}
    assert printed(capsys, "verify", dqn / "policy") == "policy: valid\n"


def test_a_linked_checkpoint_is_named(
    dqn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run refuses it."""
    run, name = tmp_path / "run", "step-000000000300"
    shutil.copytree(dqn, run)
    (run / "checkpoints" / name).rename(tmp_path / name)
    (run / "checkpoints" / name).symlink_to(tmp_path / name)
    assert "1 linked" in error_of(capsys, "verify", run)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_a_step_that_was_saved_twice_is_explained(
    dqn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("step-000000000300", "step-000000000300-2"):
        shutil.copytree(dqn / "checkpoints" / "step-000000000300", tmp_path / "checkpoints" / name)
    assert "step-000000000300-2: saved again at this step" in printed(capsys, "list", tmp_path)
    assert "saved again" not in printed(capsys, "list", dqn)


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_unwritable_output_is_rejected_in_one_line(dqn: Path, command: str) -> None:
    program = Path(__file__).parents[3] / "scripts" / "checkpoint.py"
    with open("/dev/full", "w") as full:
        command_line = [sys.executable, str(program), command, str(dqn)]
        done = subprocess.run(command_line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: stdout: cannot be written to: No space left on device\n"


def test_damaged_and_missing_checkpoints_are_rejected(
    dqn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(dqn, tmp_path / "run")
    (run / "policy" / "policy.safetensors").write_bytes(b"")
    assert "1 corrupted" in error_of(capsys, "verify", run)
    assert "has 0 bytes" in error_of(capsys, "export", run, "--out", tmp_path / "x", lines=2)
    for place, words in (
        (tmp_path, "neither checkpoints nor a policy"),
        (tmp_path / "nothing", "no such run"),
        (tmp_path / ("x" * 300), "no such run"),
        (tmp_path / "rum", f"no such run; did you mean {run}?"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["list", str(place)])
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "") and words in err
    (run / "policy" / "manifest.json").write_text("{}")
    assert "is damaged" in printed(capsys, "list", run)


@pytest.mark.parametrize("run", ["dqn", "ppo"])
def test_a_policy_is_exported_to_one_file(
    run: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = request.getfixturevalue(run)
    out = tmp_path / "policy.safetensors"
    assert str(out) in printed(capsys, "export", directory, "--best", "--out", out)
    with safe_open(out, "pt") as file:
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    spec = spec_of(metadata["spec"])
    settings = agent_settings(metadata["config"])
    actor = finished_policy(settings, spec, weights, device=torch.device("cpu"))
    obs = np.random.default_rng(0).normal(size=(5, *spec.observation_shape)).astype(spec.dtype)
    one = actor.act(obs, np.zeros(5, bool)).env_action
    module, _ = build_policy_module(read_policy(directory, best=True))
    assert torch.allclose(module(torch.from_numpy(obs)).double(), one.double(), atol=1e-5)
    assert "exists already" in error_of(capsys, "export", directory, "--out", out, code=2)
    last = directory / "policy"
    assert "is one policy" in error_of(capsys, "export", last, "--best", "--out", "x", code=2)


@pytest.mark.parametrize("run", ["dqn", "ppo"])
def test_onnx_gives_the_same_actions_or_names_missing_packages(
    run: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "policy.onnx"
    command = ("export", request.getfixturevalue(run), "--onnx", out)
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        assert "pip install onnx" in error_of(capsys, *command, code=2)
        assert list(tmp_path.iterdir()) == []
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert "same actions" in printed(capsys, *command)
        assert [path.name for path in tmp_path.iterdir()] == ["policy.onnx"]
