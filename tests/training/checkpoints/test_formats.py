"""What was saved in an older format means what it meant; what is newer, or unknown, is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from opened import job

from steadyrl.loop import train
from steadyrl.training.checkpoints.formats import FORMAT, translate, with_keys_of_before
from steadyrl.training.checkpoints.manifest import CheckpointError, manifest_of, saved_below, seal
from steadyrl.training.checkpoints.run_directory import read_summary
from steadyrl.training.cli.evaluate import command
from steadyrl.training.config.settings import load_settings, missing_keys
from steadyrl.training.tuning.members import branch

# Configurations as the first runs of each format saved them; a new format adds its own.
SAVED = sorted((Path(__file__).parent / "configurations").glob("format-*.yaml"))
DQN = ("device=cpu", "agent.hidden=[8]", "agent.compile=false", "agent.learning_starts=50",
       "agent.batch_size=16", "agent.grad_accumulation=2", "eval.every=0", "eval.episodes=1",
       "checkpoint.every=100", "checkpoint.keep=9", "total_steps=200")  # fmt: skip
PPO = ("agent=ppo", "env=pendulum", "device=cpu", "agent.hidden=[8]", "agent.compile=false",
       "agent.rollout_steps=64", "eval.every=0", "eval.episodes=1", "total_steps=64")  # fmt: skip


def config_in(file: Path) -> tuple[int, dict[str, Any]]:
    return int(file.stem.split("-")[1]), yaml.safe_load(file.read_text())


def rewrite(archive: Path, saved_as: Any, change: Callable[[dict[str, Any]], object]) -> None:
    """Have a version of another format have written a manifest."""
    manifest = json.loads((archive / "manifest.json").read_text())
    change(manifest["facts"]["config"])
    manifest["format"] = saved_as
    manifest["sha256"] = seal(manifest)
    (archive / "manifest.json").write_text(json.dumps(manifest))


def all_of(run: Path) -> list[Path]:
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
def test_configurations_of_all_formats_are_whole_today(file: Path) -> None:
    """Where this fails for a new key: raise the format and say what runs did before."""
    saved_as, config = config_in(file)
    found = translate({"config": config}, saved_as)["config"]
    assert missing_keys(found) == []
    load_settings(found)


def test_every_format_is_among_them() -> None:
    assert {config_in(file)[0] for file in SAVED} == set(range(1, FORMAT + 1))


@pytest.mark.parametrize("file", SAVED, ids=lambda file: file.stem)
def test_what_is_said_is_not_changed(file: Path) -> None:
    _, config = config_in(file)
    found = with_keys_of_before(config)
    for name, value in config.items():
        kept = {k: found[name][k] for k in value} if isinstance(value, dict) else found[name]
        assert kept == value, name


def test_dqn_of_format_1_learned_from_all_batches_that_it_added_up() -> None:
    def size(saved_as: int, name: str, pieces: Any) -> Any:
        agent = {"name": name, "batch_size": 64, "grad_accumulation": pieces}
        return translate({"config": {"agent": agent}}, saved_as)["config"]["agent"]["batch_size"]

    assert [size(1, "dqn", pieces) for pieces in (1, 3, "4", None)] == [64, 192, 256, 64]
    assert size(1, "ppo", 3) == size(2, "dqn", 3) == 64


def test_a_run_of_format_1_goes_on_as_it_began(dqn: Path, tmp_path: Path) -> None:
    run = shutil.copytree(dqn, tmp_path / "run")
    saved = saved_below(run / "checkpoints")
    assert {each.step for each in saved} == {0, 100, 200}
    for each in saved:
        if each.step == 200:  # in the last row, and at the end
            shutil.rmtree(each.path)
    shutil.rmtree(run / "policy")

    def as_it_was(config: dict[str, Any]) -> None:
        config["agent"]["batch_size"] = 8
        for key in ("noisy", "distribution", "network", "teacher"):
            del config["agent"][key]
        del config["env"]["image_axes"], config["eval"]["num_envs"]

    for archive in saved_below(run / "checkpoints"):
        rewrite(archive.path, 1, as_it_was)
    told = job(tmp_path, f"resume={run}", quick=False)
    assert told.continues == ()
    train(told)
    assert read_summary(run)["weights_sha256"] == read_summary(dqn)["weights_sha256"]
    assert {json.loads((each / "manifest.json").read_text())["format"] for each in all_of(run)} == {
        1,
        FORMAT,
    }


def test_a_policy_of_format_1_scores_what_it_scored(
    ppo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(ppo, tmp_path / "run")
    rewrite(run / "policy", 1, lambda config: config["agent"].pop("recurrent"))
    scores = []
    for each in (ppo, run):
        command([str(each), "--json", "--episodes=1"])
        scores.append(json.loads(capsys.readouterr().out)["return_mean"])
    assert scores[0] == scores[1]


@pytest.mark.parametrize("saved_as", [1, FORMAT])
def test_what_a_policy_does_not_say_is_not_guessed(
    ppo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], saved_as: int
) -> None:
    """Not for whoever evaluates it, starts from it, learns from it or goes on with its run."""
    run = shutil.copytree(ppo, tmp_path / "run")
    key = "scale_actions"
    for archive in all_of(run):
        rewrite(archive, saved_as, lambda config: config["agent"].pop(key))
    before = contents(run)
    with pytest.raises(SystemExit) as ended:
        command([str(run)])
    printed = capsys.readouterr().err
    assert ended.value.code == 3 and printed.count("\n") == 1
    assert f"policy: its configuration lacks agent.{key}, and what the run did" in printed
    with pytest.raises(CheckpointError, match=f"lacks agent.{key}"):
        job(tmp_path, f"resume={run}", quick=False)
    for start in (f"init_from={run}", f"agent.teacher={run}"):
        with pytest.raises(CheckpointError, match=f"lacks agent.{key}"):
            train(job(tmp_path / "new", *PPO, start, quick=False))
    assert contents(run) == before


def test_a_key_of_today_has_no_default_in_a_file_of_today(dqn: Path, tmp_path: Path) -> None:
    run = shutil.copytree(dqn, tmp_path / "run")
    for archive in all_of(run):
        rewrite(archive, FORMAT, lambda config: config["env"].pop("action_masks"))
    with pytest.raises(CheckpointError, match=r"lacks env\.action_masks"):
        job(tmp_path, f"resume={run}", quick=False)


def test_what_is_newer_is_refused_and_nothing_older_taken_for_it(
    dqn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(dqn, tmp_path / "run")
    newest, *older = saved_below(run / "checkpoints")
    assert older
    for archive in (newest.path, run / "policy"):
        rewrite(archive, FORMAT + 1, lambda config: config.clear())
    before, told = contents(run), f"newer version .format {FORMAT + 1}, "
    for resume in (f"resume={run}", "resume=auto"):
        with pytest.raises(CheckpointError, match=told):
            job(tmp_path, *DQN, resume, quick=False)
    with pytest.raises(CheckpointError, match=told):
        train(job(tmp_path / "new", *DQN, f"init_from={run}", quick=False))
    with pytest.raises(SystemExit) as ended:
        command([str(run)])
    assert ended.value.code == 3 and capsys.readouterr().err.count("\n") == 1
    assert contents(run) == before


def test_a_format_that_flipped_is_damage_and_the_one_before_is_taken(
    dqn: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(dqn, tmp_path / "run")
    file = saved_below(run / "checkpoints")[0].path / "manifest.json"
    text = file.read_text()
    assert f'"format": {FORMAT}' in text
    file.write_text(text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    assert job(tmp_path, f"resume={run}", quick=False).settings.agent.name == "dqn"


@pytest.mark.parametrize("saved_as", [True, 1.0, "1", 0, -1, None, []], ids=repr)
def test_what_is_no_format_is_refused(ppo: Path, tmp_path: Path, saved_as: Any) -> None:
    policy = shutil.copytree(ppo / "policy", tmp_path / "policy")
    rewrite(policy, saved_as, lambda config: None)
    with pytest.raises(CheckpointError, match="does not say its format"):
        manifest_of(policy)


def test_a_member_that_branches_off_an_older_run_is_not_translated_twice(
    dqn: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(dqn, tmp_path / "run")
    for archive in all_of(run):
        rewrite(archive, 1, lambda config: config["agent"].update(batch_size=8))
    [newest, *_] = saved_below(run / "checkpoints")
    config = manifest_of(newest.path)["facts"]["config"]
    assert config["agent"]["batch_size"] == 16
    assert branch(run, tmp_path / "member", config) == newest.step
    [copied] = saved_below(tmp_path / "member" / "checkpoints")
    assert manifest_of(copied.path)["facts"]["config"] == config
