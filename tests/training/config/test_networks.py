"""Network settings: defaults per agent, validation, resuming and loading weights."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from opened import job
from refused import refusal

from steadyrl.agents.networks.settings import PLAIN, fitting
from steadyrl.agents.registry import agent_class
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import DiscreteActions, EnvSpec, MultiDiscreteActions
from steadyrl.loop import train
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    manifest_metadata,
)
from steadyrl.training.config.overrides import flatten
from steadyrl.training.policies.find import Policy, find_policy, settings_of
from steadyrl.training.policies.policy import (
    SHAPING,
    agent_settings,
    build_policy_module,
    network_of,
    read_policy,
    starting_policy,
)
from steadyrl.training.run.job import compose_one

FEW = ("total_steps=60", "agent.learning_starts=20", "eval.every=0", "checkpoint.every=20")


@pytest.mark.parametrize(("agent", "activation"), [("dqn", "relu"), ("ppo", "tanh")])
def test_network_defaults_depend_on_the_agent(agent: str, activation: str) -> None:
    plain = compose_one([f"agent={agent}"]).agent
    assert plain.network.activation == activation
    chosen = compose_one([f"agent={agent}", "agent.network.encoder=impala"]).agent
    assert chosen.network == {**plain.network, "encoder": "impala"}
    assert chosen.hidden == plain.hidden


@pytest.mark.parametrize(
    ("shape", "name", "line"),
    [
        ((4,), "impala", "needs images, but Some-v1 is observed as vectors of 4, which fit mlp"),
        ((4,), "minatar", "needs images, but Some-v1 is observed as vectors of 4, which fit mlp"),
        (
            (2, 3),
            "nature",
            "needs images of 36x36 or more, but Some-v1 is observed as vectors of 2",
        ),
        ((4, 10, 10), "nature", "is observed as images of 4x10x10, which fit impala, minatar, mlp"),
        ((4, 35, 84), "der", "needs images of 36x36 or more, but Some-v1 is observed as images"),
        ((4, 35, 84), "nature", "is observed as images of 4x35x84, which fit impala, minatar, mlp"),
    ],
)
def test_unsuitable_encoders_are_rejected_with_suitable_ones(
    shape: tuple[int, ...], name: Any, line: str
) -> None:
    spec = EnvSpec("Some-v1", 1, shape, "uint8", 1, DiscreteActions(2))
    with pytest.raises(SettingError, match=f"agent.network.encoder={name}: .*{line}"):
        replace(PLAIN, encoder=name).validate_fit(spec)
    for fits in ("auto", *fitting(shape)):
        replace(PLAIN, encoder=fits).validate_fit(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("agent=ppo agent.network.encoder=impala", "agent.network.encoder=impala: needs images"),
        ("agent=dqn agent.network.encoder=nature", "agent.network.encoder=nature: needs images"),
        ("agent.network=impala", "is a group of keys: write agent.network.encoder=impala"),
        ("agent.network.encoder=resnet", "must be auto or one of mlp, nature, impala, minatar"),
        ("agent.network.activation=gelu", "must be one of relu, tanh, elu, silu"),
    ],
)
def test_invalid_network_settings_are_rejected_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, line: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *typed.split()])
    assert line in refusal(capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(job(folder, *FEW))
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.slow
def test_a_resumed_run_keeps_its_network(run: Path, tmp_path: Path) -> None:
    assert build_policy_module(read_policy(run))[1].id == "CartPole-v1"
    continued = job(tmp_path, f"resume={run}", "total_steps=90", quick=False)
    assert continued.settings.agent == settings_of(find_policy(run), []).agent
    assert continued.continues == ("total_steps=90 (was 60)",)
    with pytest.raises(SettingError, match=r"encoder=mlp: cannot change when a run is continued"):
        job(tmp_path, f"resume={run}", "agent.network.encoder=mlp", quick=False)


@pytest.mark.slow
def test_weights_are_loaded_only_into_an_equal_network(run: Path) -> None:
    metadata = manifest_metadata(run / "policy")
    expected = {"encoder": "mlp", "layer_norm": False, "activation": "relu"}
    expected |= {"distribution": {"kind": "none"}}
    assert network_of(metadata) == expected
    other = json.loads(json.dumps(metadata))
    other["config"]["agent"]["network"]["encoder"] = "mlp"  # what auto selects for vectors
    assert starting_policy(run, other)
    other["config"]["agent"]["network"]["activation"] = "tanh"
    with pytest.raises(CheckpointError, match=r"network is .*'relu'.* there and .*'tanh'.* here"):
        starting_policy(run, other)
    other = json.loads(json.dumps(metadata))
    other["config"]["agent"]["distribution"]["kind"] = "quantile"
    with pytest.raises(CheckpointError, match=r"'none'.* there and .*'quantile'.* here"):
        starting_policy(run, other)


def ppo_metadata(*options: str) -> dict[str, Any]:
    """Return the metadata of a PPO policy, as far as `init_from` compares weights."""
    config: Any = OmegaConf.to_container(compose_one(["agent=ppo", *options]), resolve=True)
    spec = EnvSpec("Some-v1", 1, (4,), "float32", 1, DiscreteActions(2))
    network, _ = agent_class("ppo").policy(agent_settings(config), spec, torch.device("meta"))
    weights = {name: list(weight.shape) for name, weight in network.state_dict().items()}
    return {"agent": "ppo", "config": config, "weights": weights}


@pytest.mark.parametrize(
    "option", ["agent.popart=true", "agent.shared_trunk=true", "agent.recurrent.cell=gru"]
)
def test_weights_that_do_not_fit_name_the_key_they_depend_on(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, here = ppo_metadata(), ppo_metadata(option)
    where = "steadyrl.training.policies.policy.find_policy"
    monkeypatch.setattr(where, lambda path: Policy(path, saved))
    with pytest.raises(CheckpointError) as refused:
        starting_policy(Path("run"), here)
    assert refused.value.details[0].startswith(option.partition("=")[0] + "=")


def test_keys_that_weights_depend_on_are_keys() -> None:
    composed = (compose_one([f"agent={name}"]) for name in ("dqn", "ppo"))
    keys = {key for each in composed for key, _ in flatten(OmegaConf.to_container(each))}
    assert [name for name in SHAPING if not any(key.startswith(name) for key in keys)] == []


def test_distribution_bounds_are_part_of_the_network(run: Path) -> None:
    metadata = json.loads(json.dumps(manifest_metadata(run / "policy")))
    returns = metadata["config"]["agent"]["distribution"]
    returns |= {"kind": "c51", "v_min": 0.0, "v_max": 100.0}
    atoms = network_of(metadata)
    returns["v_max"] = 1.0
    assert network_of(metadata) != atoms
    returns["kind"] = "quantile"  # quantiles have no bounds
    quantiles = network_of(metadata)
    returns["v_max"] = 100.0
    assert network_of(metadata) == quantiles


@pytest.mark.parametrize(
    ("agent", "action"),
    [
        ("dqn", DiscreteActions(10**9)),
        ("ppo", DiscreteActions(10**9)),
        ("ppo", MultiDiscreteActions((10**9 - 5, 5))),
    ],
)
def test_more_actions_than_a_network_has_outputs_are_refused(
    tmp_path: Path, agent: str, action: Any
) -> None:
    """Not by the memory that such a layer would need, and with what can be done."""
    given = job(tmp_path, f"agent={agent}", "env=cartpole", quick=False)
    reason = (
        r"env\.id=CartPole-v1: has 1,000,000,000 discrete actions, .* at most 1,000,000 .*wrapper"
    )
    with pytest.raises(SettingError, match=reason):
        given.settings.agent.validate_fit(replace(given.spec, action=action), 50_000)
    given.settings.agent.validate_fit(replace(given.spec, action=DiscreteActions(10**6)), 50_000)
