"""Checkpoints of other formats or with missing keys are rejected in one line, unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from opened import job

from steadyrl.agents.registry import ALGORITHMS
from steadyrl.loop import train
from steadyrl.training.checkpoints.formats import FORMAT
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    manifest_of,
    saved_below,
    self_hash,
)
from steadyrl.training.cli.evaluate import main
from steadyrl.training.config.settings import load_settings, missing_keys

# Configurations as runs of this format save them; a new format replaces them.
SAVED = sorted((Path(__file__).parent / "configurations").glob("format-*.yaml"))
DQN = ("device=cpu", "agent.hidden=[8]", "agent.compile=false", "agent.learning_starts=50",
       "agent.batch_size=16", "agent.grad_accumulation=2", "eval.every=0", "eval.episodes=1",
       "checkpoint.every=100", "checkpoint.keep=9", "total_steps=200")  # fmt: skip
PPO = ("agent=ppo", "env=pendulum", "device=cpu", "agent.hidden=[8]", "agent.compile=false",
       "agent.rollout_steps=64", "eval.every=0", "eval.episodes=1", "total_steps=64")  # fmt: skip


def config_in(file: Path) -> tuple[int, dict[str, Any]]:
    return int(file.stem.split("-")[1]), yaml.safe_load(file.read_text())


def rewrite(archive: Path, format_: Any, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a manifest as a version with another format would have written it."""
    manifest = json.loads((archive / "manifest.json").read_text())
    change(manifest["metadata"]["config"])
    manifest["format"] = format_
    manifest["sha256"] = self_hash(manifest)
    (archive / "manifest.json").write_text(json.dumps(manifest))


def archives_of(run: Path) -> list[Path]:
    return [run / "policy", *(saved.path for saved in saved_below(run / "checkpoints"))]


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def dqn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dqn")
    train(job(folder, *DQN, quick=False))
    return folder / "run"


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    train(job(folder, *PPO, quick=False))
    return folder / "run"


@pytest.mark.parametrize("file", SAVED, ids=lambda file: file.stem)
def test_sample_configurations_of_this_format_have_every_key(file: Path) -> None:
    """If this fails after adding a key: raise the format, and replace these configurations."""
    format_, config = config_in(file)
    assert format_ == FORMAT
    assert missing_keys(config) == []
    load_settings(config)


def test_every_algorithm_has_a_sample_configuration() -> None:
    command = "python train.py agent=NAME --cfg job --resolve > tests/training/checkpoints/"
    command += f"configurations/format-{FORMAT}-NAME.yaml"
    assert {config_in(file)[1]["agent"]["name"] for file in SAVED} == set(ALGORITHMS), command


def test_missing_keys_of_a_policy_are_not_guessed(
    ppo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In evaluation, `init_from`, distillation and resuming."""
    run = shutil.copytree(ppo, tmp_path / "run")
    key = "scale_actions"
    for archive in archives_of(run):
        rewrite(archive, FORMAT, lambda config: config["agent"].pop(key))
    before = contents(run)
    with pytest.raises(SystemExit) as ended:
        main([str(run)])
    printed = capsys.readouterr().err
    assert ended.value.code == 3 and printed.count("\n") == 1
    assert f"policy: its configuration lacks agent.{key}, and what the run did" in printed
    with pytest.raises(CheckpointError, match=f"lacks agent.{key}"):
        job(tmp_path, f"resume={run}", quick=False)
    for start in (f"init_from={run}", f"agent.teacher.policy={run}"):
        with pytest.raises(CheckpointError, match=f"lacks agent.{key}"):
            train(job(tmp_path / "new", *PPO, start, quick=False))
    assert contents(run) == before


def test_missing_keys_of_a_checkpoint_are_rejected(dqn: Path, tmp_path: Path) -> None:
    run = shutil.copytree(dqn, tmp_path / "run")
    for archive in archives_of(run):
        rewrite(archive, FORMAT, lambda config: config["env"].pop("action_masks"))
    with pytest.raises(CheckpointError, match=r"lacks env\.action_masks"):
        job(tmp_path, f"resume={run}", quick=False)


@pytest.mark.parametrize(("format_", "age"), [(FORMAT - 1, "older"), (FORMAT + 1, "newer")])
def test_other_formats_are_rejected_without_using_older_checkpoints(
    dqn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], format_: int, age: str
) -> None:
    run = shutil.copytree(dqn, tmp_path / "run")
    newest, *others = saved_below(run / "checkpoints")
    assert others
    for archive in (newest.path, run / "policy"):
        rewrite(archive, format_, lambda config: config.clear())
    before, message = (
        contents(run),
        f"an? {age} version .format {format_}, and this one reads format",
    )
    for resume in (f"resume={run}", "resume=auto"):
        with pytest.raises(CheckpointError, match=message):
            job(tmp_path, *DQN, resume, quick=False)
    for start in (f"init_from={run}", f"agent.teacher.policy={run}"):
        with pytest.raises(CheckpointError, match=message):
            train(job(tmp_path / "new", *DQN, start, quick=False))
    with pytest.raises(SystemExit) as ended:
        main([str(run)])
    assert ended.value.code == 3 and capsys.readouterr().err.count("\n") == 1
    assert contents(run) == before


def test_a_corrupted_format_falls_back_to_the_previous_checkpoint(
    dqn: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(dqn, tmp_path / "run")
    file = saved_below(run / "checkpoints")[0].path / "manifest.json"
    text = file.read_text()
    assert f'"format": {FORMAT}' in text
    file.write_text(text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    assert job(tmp_path, f"resume={run}", quick=False).settings.agent.name == "dqn"


@pytest.mark.parametrize("format_", [True, 1.0, "1", 0, -1, None, []], ids=repr)
def test_invalid_formats_are_rejected(ppo: Path, tmp_path: Path, format_: Any) -> None:
    policy = shutil.copytree(ppo / "policy", tmp_path / "policy")
    rewrite(policy, format_, lambda config: None)
    with pytest.raises(CheckpointError, match="does not say its format"):
        manifest_of(policy)
