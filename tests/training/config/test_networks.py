"""Networks by configuration: what is chosen, what is refused, and what was saved before."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from opened import job

from steadyrl.agents.networks.settings import PLAIN, fitting
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import DiscreteActions, EnvSpec
from steadyrl.loop import train
from steadyrl.training.checkpoints.formats import translate
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    manifest_facts,
    saved_below,
    seal,
)
from steadyrl.training.cli.arguments import help_text, read
from steadyrl.training.cli.main import main
from steadyrl.training.config.settings import CONFIGS
from steadyrl.training.policies.find import find_policy, settings_of
from steadyrl.training.policies.policy import deciding, network_of, read_policy, starting_weights
from steadyrl.training.run.job import compose_one

FEW = ("total_steps=60", "agent.learning_starts=20", "eval.every=0", "checkpoint.every=20")


@pytest.mark.parametrize(
    ("name", "hidden"),
    [("auto", 64), ("mlp", 64), ("nature", 512), ("impala", 256), ("minatar", 128)],
)
def test_a_preset_is_the_published_network_whole(name: str, hidden: int) -> None:
    chosen = compose_one(["agent=ppo", f"agent/network={name}"]).agent
    assert chosen.network.trunk == name
    assert chosen.hidden[-1] == hidden


def test_a_size_that_is_typed_wins_over_that_of_a_preset() -> None:
    assert compose_one(["agent.hidden=[9]", "agent/network=impala"]).agent.hidden == [9]


def test_a_dot_does_as_well_as_a_slash() -> None:
    assert read(["agent.network=mlp"]).overrides == ["agent/network=mlp"]
    assert read(["-m", "agent.network=mlp,auto"]).overrides == ["agent/network=mlp,auto"]
    for about_keys in ("agent.network={trunk:mlp}", "agent.network.trunk=mlp"):
        assert read([about_keys]).overrides == [about_keys]


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
        ((4, 35, 84), "nature", "is observed as images of 4x35x84, which fit impala, minatar, mlp"),
    ],
)
def test_what_does_not_fit_is_refused_by_naming_what_does(
    shape: tuple[int, ...], name: Any, line: str
) -> None:
    spec = EnvSpec("Some-v1", 1, shape, "uint8", 1, DiscreteActions(2))
    with pytest.raises(SettingError, match=f"agent.network={name}: .*{line}"):
        replace(PLAIN, trunk=name).refuse_unfit(spec)
    for fits in ("auto", *fitting(shape)):
        replace(PLAIN, trunk=fits).refuse_unfit(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("agent=ppo agent.network=impala", "agent.network=impala: needs images"),
        ("agent=dqn agent.network=nature", "agent.network=nature: needs images"),
        ("agent.network=impal", "no such agent/network; did you mean impala?"),
        ("+agent/network=mlp", "write it without +: agent/network=mlp"),
        ("agent.network.trunk=resnet", "must be auto or one of mlp, nature, impala, minatar"),
        ("agent.activation=gelu", "must be one of relu, tanh, elu, silu"),
    ],
)
def test_a_wrong_name_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, line: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *typed.split()])
    with pytest.raises(SystemExit) as left:
        main(lambda _: pytest.fail("it was accepted"))
    assert left.value.code == 2
    [said] = capsys.readouterr().err.splitlines()
    assert line in said


def test_the_help_names_them() -> None:
    assert "agent.network=auto, impala, minatar, mlp, nature" in help_text(CONFIGS)


def rewrite(folder: Path, absent: tuple[str, ...]) -> None:
    """Take keys out of a saved configuration, as if it had been written before there were any."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for key in absent:
        manifest["facts"]["config"]["agent"].pop(key, None)
    manifest["format"] = 1
    manifest["sha256"] = seal(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


NEW = (
    "network",
    "activation",
    "learning_rate_end",
    "learning_rate_warmup",
    "anneal_epsilon",
    "epsilon_warmup",
    "clip_end",
    "clip_warmup",
    "anneal_entropy_coef",
    "entropy_coef_end",
    "entropy_coef_warmup",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(job(folder, *FEW))
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_what_a_configuration_lacks_means_what_was_done_before() -> None:
    for name in ("dqn", "ppo"):
        config: Any = OmegaConf.to_container(compose_one([f"agent={name}"]), resolve=True)
        older = json.loads(json.dumps(config))
        there = {"activation"} if name == "ppo" else set()  # from the beginning
        for key in [key for key in NEW if key in older["agent"] and key not in there]:
            del older["agent"][key]
        assert older != config
        assert translate({"config": older}, 1) == {"config": config}
    strange = {"agent": {"name": "outside.a2c"}, "seed": 3}
    found = translate({"config": strange}, 1)["config"]
    assert found["agent"] == {"name": "outside.a2c"}
    assert found["seed"] == 3


@pytest.mark.slow
def test_what_was_saved_before_there_were_networks_to_choose_still_loads(
    run: Path, tmp_path: Path
) -> None:
    now = settings_of(find_policy(run), [])
    saved = [each.path for each in saved_below(run / "checkpoints")]
    for folder in (run / "policy", *saved):
        rewrite(folder, NEW)
    policy = read_policy(run)
    assert settings_of(find_policy(run), []) == now
    assert deciding(policy)[1].id == "CartPole-v1"
    continued = job(tmp_path, f"resume={run}", "total_steps=90", quick=False)
    assert continued.settings.agent == now.agent
    assert continued.continues == ("total_steps=90 (was 60)",)
    with pytest.raises(SettingError, match=r"trunk=mlp: cannot change when a run is continued"):
        job(tmp_path, f"resume={run}", "agent/network=mlp", quick=False)


@pytest.mark.slow
def test_weights_start_another_run_only_if_they_mean_the_same(run: Path) -> None:
    facts = manifest_facts(run / "policy")
    said = {"trunk": "mlp", "layer_norm": False, "activation": "relu", "distribution": "none"}
    assert network_of(facts) == said
    other = json.loads(json.dumps(facts))
    other["config"]["agent"]["network"]["trunk"] = "mlp"  # what auto is for a vector
    assert starting_weights(run, other)
    other["config"]["agent"]["activation"] = "tanh"
    with pytest.raises(CheckpointError, match=r"network is .*'relu'.* there and .*'tanh'.* here"):
        starting_weights(run, other)
    other = json.loads(json.dumps(facts))
    other["config"]["agent"]["distribution"] = "quantile"
    with pytest.raises(CheckpointError, match=r"'none'.* there and .*'quantile'.* here"):
        starting_weights(run, other)
    rewrite(run / "policy", NEW)
    assert starting_weights(run, facts)


def test_numbers_of_a_last_layer_mean_what_its_settings_say(run: Path) -> None:
    facts = json.loads(json.dumps(manifest_facts(run / "policy")))
    agent = facts["config"]["agent"]
    agent |= {"distribution": "c51", "v_min": 0.0, "v_max": 100.0}
    atoms = network_of(facts)
    agent["v_max"] = 1.0
    assert network_of(facts) != atoms
    agent["distribution"] = "quantile"  # which have no bounds
    quantiles = network_of(facts)
    agent["v_max"] = 100.0
    assert network_of(facts) == quantiles
