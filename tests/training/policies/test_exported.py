"""Exported files as a source of `steadyrl.load`: read without running code, checked as they are."""

import json
import os
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import warm
from safetensors.numpy import load_file, save_file

import steadyrl
from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import ExpectedError, SettingError
from steadyrl.training.cli.policy_files.export import main as export
from steadyrl.training.policies.policy import build_policy_module, read_policy

SMALL = (
    "agent=ppo", "env=pendulum", "env.num_envs=2", "agent.hidden=[8]", "agent.rollout_steps=32",
    "agent.epochs=1", "agent.minibatches=1", "agent.compile=false", "device=cpu", "eval.every=0",
    "total_steps=64", "agent.normalize_obs=true",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Path(warm.run(tmp_path_factory.mktemp("run"), *SMALL, quick=False)[0])


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "policy.safetensors"
    export([str(run), "--out", str(out)])
    return out


def test_an_exported_file_acts_as_its_policy(run, file, tmp_path):
    alone = shutil.copy(file, tmp_path / "other.safetensors")
    there, here = steadyrl.load(run), steadyrl.load(alone)
    assert here.metadata == there.metadata
    assert (here.observation_space, here.action_space) == (
        there.observation_space,
        there.action_space,
    )
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for deterministic in (True, False):
        assert (
            here.act(obs, deterministic=deterministic).tolist()
            == there.act(obs, deterministic=deterministic).tolist()
        )
    assert steadyrl.evaluate(here, episodes=1) == steadyrl.evaluate(run, episodes=1)


def test_a_policy_with_a_hidden_state_is_no_function_of_the_observation(
    tmp_path, monkeypatch, capsys
):
    directory = warm.run(tmp_path, *SMALL, "agent.recurrent.cell=gru", quick=False)[0]
    with pytest.raises(SettingError, match=r"has a hidden state \(agent\.recurrent\.cell=gru\)$"):
        build_policy_module(read_policy(Path(directory)))
    out, instead = tmp_path / "gru-1.5.onnx", tmp_path / "gru-1.5.safetensors"
    monkeypatch.setitem(sys.modules, "onnx", None)  # not installed: no reason to install it
    for files in ([f"--onnx={out}"], [f"--out={out}"], [f"--out={instead}", f"--onnx={out}"]):
        with pytest.raises(SystemExit) as left:
            export([str(directory), *files])
        assert left.value.code == 2
        assert capsys.readouterr().err == (
            f"error: --onnx={out}: the policy has a hidden state (agent.recurrent.cell=gru), which "
            f"an ONNX file cannot hold: write --out {instead}, which steadyrl.load reads\n"
        )
        assert not out.exists() and not instead.exists()
    with pytest.raises(SystemExit):
        export([str(directory), "--onnx", str(tmp_path / "gru-1.5")])
    assert f"write --out {instead}, which" in capsys.readouterr().err
    export([str(directory), "--out", str(instead)])
    policy, (low, high) = steadyrl.load(instead), (np.zeros(3, np.float32), np.ones(3, np.float32))
    first = policy.act(low).tolist()
    assert policy.act(high).tolist() != policy.act(low).tolist() != first


def test_an_onnx_file_names_the_size_of_an_action(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    export([str(run), "--onnx", str(tmp_path / "policy.onnx")])
    model = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
    assert [(part.name, part.shape) for part in (*model.get_inputs(), *model.get_outputs())] == [
        ("observation", ["n", 3]), ("action", ["n", 1])
    ]  # fmt: skip


def test_a_full_disk_keeps_no_part_of_an_exported_file(run, small_disk, capsys):
    """It would be refused as there already once there is space."""
    with suppress(OSError), (small_disk / "full").open("wb", buffering=0) as full:
        while full.write(bytes(4096)):
            pass
    with pytest.raises(SystemExit):
        export([str(run), "--out", str(small_disk / "policy.safetensors")])
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir(small_disk) == ["full"]


class Bomb:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("suffix", ["pt", "pth", "pt2", "zip", "pkl", "ckpt", "onnx", "bin", ""])
def test_files_of_other_kinds_are_refused_unread(tmp_path, suffix):
    marker, path = tmp_path / "run-by-loading", tmp_path / f"policy.{suffix}".rstrip(".")
    path.write_bytes(pickle.dumps(Bomb(marker)))
    what = "does not say how observations" if suffix == "onnx" else "can run code"
    with pytest.raises(ExpectedError, match=what) as caught:
        steadyrl.load(path)
    assert str(caught.value).endswith(f"{command_of('export')} RUN --out policy.safetensors")
    assert "\n" not in str(caught.value) and not marker.exists()


def texts_of(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])["__metadata__"]


def test_damaged_and_foreign_files_are_refused_in_one_line(run, file, tmp_path):
    weights, texts, data = load_file(file), texts_of(file), file.read_bytes()
    huge = {name: np.zeros(10_000, np.float32) for name in weights}
    files = {
        "header claims": (2**40).to_bytes(8, "little") + data[8:],
        "header is no table": data[:8] + b"x" * (len(data) - 8),
        "bytes, its header describes": data[:-4],
    }
    saved = {
        "is not an exported policy": (weights, None),
        "another version": (weights, {**texts, "format": "1"}),
        "not an exported": (weights, {**texts, "spec": "{"}),
        "holds no configuration": (weights, {**texts, "config": "[]"}),
        "weight shapes": (weights, {**texts, "weights": "[]"}),
        "at most": (huge, texts),
        "do not fit this network": ({name: w.ravel()[:1] for name, w in weights.items()}, texts),
        "spaces cannot be read": (weights, {**texts, "spaces": "[]"}),
        "is no value but a reference": (
            weights, {**texts, "config": texts["config"].replace("Pendulum-v1", "${oc.env:HOME}")}
        ),
    }  # fmt: skip
    for number, (reason, content) in enumerate([*files.items(), *saved.items()]):
        path = tmp_path / f"{number}.safetensors"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            save_file(content[0], path, metadata=content[1])
        with pytest.raises(ExpectedError, match=reason) as caught:
            steadyrl.load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ExpectedError, match="name the run, or the folder of its policy"):
        steadyrl.load(run / "policy" / "policy.safetensors")
