"""Resuming: extended runs, changed settings, missing and damaged checkpoints, init_from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from opened import job
from safetensors.torch import load_file
from warm import run, start

from steadyrl.core.errors import SettingError
from steadyrl.loop import loop
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    manifest_metadata,
    verified_metadata,
)
from steadyrl.training.checkpoints.resume import find_origin
from steadyrl.training.checkpoints.run_directory import SUMMARY
from steadyrl.training.run.collector import build_collector
from steadyrl.training.setup import open_run


def names(directory: Path) -> list[str]:
    path = directory / "checkpoints"
    return sorted(os.listdir(path)) if path.exists() else []


def metrics(directory: Path) -> list[dict[str, float]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [
        {
            tag: value
            for tag, value in json.loads(line).items()
            if tag == "memory/replay_fill"
            or not tag.startswith(("time/", "memory/", "wall_seconds"))
        }
        for line in lines
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(folder, "total_steps=600", "eval.every=300", "run_dir=run")
    return folder


@pytest.fixture
def copy_(finished: Path, tmp_path: Path) -> Path:
    """Return a folder with a copy of the finished run."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


def test_a_finished_run_has_checkpoints_and_policies(finished: Path) -> None:
    assert names(finished / "run")[-1] == "step-000000000600"
    for name in ("policy", "policy-best"):
        files = sorted(path.name for path in (finished / "run" / name).iterdir())
        assert files == ["manifest.json", "policy.json", "policy.safetensors"]


def test_a_finished_run_resumes_with_more_steps(copy_: Path) -> None:
    longer = ("resume=run", "total_steps=900", "log.every=100")
    directory, summary, printed = run(copy_, *longer, quick=False)
    assert "resumed from step 600" in printed
    assert "total_steps=900 (was 600)" in printed
    assert "schedules follow the new total_steps" in printed
    assert (summary["steps"], summary["resumed_from_step"], summary["status"]) == (
        900,
        600,
        "finished",
    )
    steps = [line["step"] for line in metrics(directory)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 900


def test_an_extended_run_keeps_the_line_of_its_last_evaluation(tmp_path: Path) -> None:
    """It comes after the checkpoint of the same step, and is no better than the one before."""
    agent = ("agent=ppo", "agent.rollout_steps=256", "agent.epochs=1", "agent.learning_rate=1e-12")
    due = ("eval.every=1000", "log.every=1000", "checkpoint.every=2400")
    first = ("env=cartpole", "env.num_envs=8", "device=cpu", "agent.normalize_obs=false")
    run(tmp_path, *agent, *due, *first, "total_steps=2400", "run_dir=run", quick=False)
    before = metrics(tmp_path / "run")
    assert before[-1]["step"] >= 2400 and "eval/return_mean" in before[-1]
    run(tmp_path, "total_steps=2700", "resume=run", quick=False)
    assert metrics(tmp_path / "run")[: len(before)] == before


def test_a_damaged_best_policy_is_replaced(copy_: Path) -> None:
    weights = copy_ / "run" / "policy-best" / "policy.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    _, _, text = run(copy_, "resume=run", "total_steps=900", quick=False)
    assert "policy-best is damaged or gone, or was scored by other episodes" in text
    assert verified_metadata(weights.parent)["step"] == 900


def test_a_copy_of_the_checkpoints_alone_gets_a_best_policy_again(
    copy_: Path,
) -> None:
    (copy_ / "moved").mkdir()
    (copy_ / "run" / "checkpoints").rename(copy_ / "moved" / "checkpoints")
    directory, summary, _ = run(copy_, "resume=moved", "total_steps=900", quick=False)
    best = manifest_metadata(directory / "policy-best")
    assert (best["step"], best["eval_return_mean"]) == (900, summary["best_eval_return_mean"])


def test_a_link_may_name_a_checkpoint(copy_: Path) -> None:
    link = copy_ / "mine"
    link.symlink_to(copy_ / "run" / "checkpoints" / names(copy_ / "run")[-1])
    assert find_origin(str(link)) == find_origin(str(link.resolve()))
    assert find_origin(str(link)).run == copy_ / "run"


def test_a_finished_run_says_that_nothing_is_left_to_train(copy_: Path) -> None:
    _, summary, printed = run(copy_, "resume=run", quick=False)
    why = "all 600 steps are done; total_steps=1200 trains on"
    assert f"nothing is left to train: {why}\n" in printed
    assert "schedules follow" not in printed
    assert (summary["steps"], summary["status"]) == (600, "finished")


@pytest.mark.parametrize("resume", ["run", "auto", "run/checkpoints/step-000000000600"])
def test_a_length_below_the_steps_that_are_done_is_refused(copy_: Path, resume: str) -> None:
    """It would be the length of the run from then on, and its configuration's."""
    before = fingerprint(copy_ / "run")
    where = ("run_dir=run",) if resume == "auto" else ()
    process = start(copy_, f"resume={resume}", "total_steps=300", *where, quick=False)
    _, err = process.communicate()
    assert (process.returncode, err.splitlines()[-1]) == (
        2,
        "error: total_steps=300: is the whole length, and 600 steps are done; total_steps=900 "
        "trains 300 more",
    )
    assert fingerprint(copy_ / "run") == before


def test_resuming_a_finished_run_removes_its_summary(copy_: Path) -> None:
    longer = job(copy_, f"resume={copy_ / 'run'}", "total_steps=900", quick=False)
    with open_run(longer) as (run, env, agent):
        assert not (copy_ / "run" / SUMMARY).exists()
        loop(run, build_collector(run, env, agent))
    assert json.loads((copy_ / "run" / SUMMARY).read_text())["steps"] == 900


@pytest.mark.parametrize(
    ("key", "tag", "was", "expected"),
    [
        # The last step is always logged, but evaluated only with eval.every > 0.
        ("log", "train/learning_rate", 0, [600, 900, 1200]),
        ("eval", "eval/return_mean", 0, [900, 1200]),
        ("log", "train/learning_rate", 5000, [600, 900, 1200]),
        ("eval", "eval/return_mean", 5000, [600, 900, 1200]),
    ],
)
def test_logging_and_evaluation_intervals_may_change_on_resume(
    tmp_path: Path, key: str, tag: str, was: int, expected: list[int]
) -> None:
    overrides = {"log.every": 0, "eval.every": 0, "eval.episodes": 1, "run_dir": "run"}
    overrides[f"{key}.every"] = was
    run(tmp_path, "total_steps=600", *(f"{k}={v}" for k, v in overrides.items()), quick=False)
    overrides[f"{key}.every"] = 300
    directory, summary, _ = run(
        tmp_path,
        "total_steps=1200",
        "resume=auto",
        *(f"{k}={v}" for k, v in overrides.items()),
        quick=False,
    )
    assert (summary["status"], summary["steps"]) == ("finished", 1200)
    steps = [line["step"] for line in metrics(directory) if tag in line]
    assert steps == expected


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("agent.gamma=0.9", "cannot change when a run is continued"),
        ("agent=ppo", "cannot change when a run is continued"),
        ("env=acrobot", "cannot change when a run is continued"),
    ],
)
def test_immutable_settings_are_rejected_on_resume(
    finished: Path, override: str, reason: str
) -> None:
    with pytest.raises(SettingError, match=reason):
        job(finished, f"resume={finished / 'run'}", override, quick=False)


def test_a_resumed_run_ignores_run_dir_with_a_note(copy_: Path) -> None:
    same_dir = ("total_steps=800", "resume=run", f"run_dir={copy_ / 'run'}")
    other_dir = ("total_steps=900", "resume=run", "run_dir=another")
    assert "stays where it is" not in run(copy_, *same_dir)[2]
    directory, summary, printed = run(copy_, *other_dir)
    assert f"with run_dir={copy_ / 'run'} (not another: a continued run stays where" in printed
    assert summary["steps"] == 900 and directory == copy_ / "run"
    assert not (copy_ / "another").exists()


def test_resuming_without_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        job(tmp_path, f"resume={tmp_path}")
    with pytest.raises(SettingError, match="run_dir"):
        job(tmp_path, "resume=auto", "run_dir=null")


def test_auto_restarts_a_run_without_checkpoints(tmp_path: Path) -> None:
    directory, _, _ = run(tmp_path, "total_steps=300", "run_dir=run", "log.every=100")
    for name in ("checkpoints", "policy"):
        shutil.rmtree(directory / name)
    (directory / ".config.yaml-0123abcd").write_text("half")
    again = ("total_steps=300", "run_dir=run", "log.every=100", "resume=auto")
    _, summary, printed = run(tmp_path, *again)
    assert "starting over" in printed
    assert (summary["steps"], summary["resumed_from_step"]) == (300, None)
    assert [line["step"] for line in metrics(directory)] == [100, 200, 300]
    assert not (directory / ".config.yaml-0123abcd").exists()
    aside = directory / "set-aside" / "without-checkpoint"
    assert f"set aside in {aside}" in printed
    assert [line["step"] for line in metrics(aside)] == [100, 200, 300]
    assert (aside / "policy-best").is_dir() and (directory / "policy-best").is_dir()


def test_a_run_without_a_first_checkpoint_sets_nothing_aside(tmp_path: Path) -> None:
    directory, _, _ = run(tmp_path, "total_steps=300", "run_dir=run", "log.every=100")
    shutil.rmtree(directory / "policy")
    for path in (directory / "checkpoints").iterdir():
        shutil.rmtree(path)
    run(tmp_path, "total_steps=300", "run_dir=run", "log.every=100", "resume=auto")
    assert [line["step"] for line in metrics(directory)] == [100, 200, 300]
    assert not (directory / "set-aside").exists()


def test_a_run_without_a_first_checkpoint_that_has_other_settings_sets_aside(
    tmp_path: Path,
) -> None:
    saves = ("run_dir=run", "log.every=100", "eval.every=150", "total_steps=300")
    directory, _, _ = run(tmp_path, *saves)
    shutil.rmtree(directory / "policy")
    for path in (directory / "checkpoints").iterdir():
        shutil.rmtree(path)
    run(tmp_path, *saves, "agent.learning_rate=1e-6", "resume=auto")
    aside = directory / "set-aside" / "without-checkpoint"
    assert (aside / "policy-best").is_dir() and len(metrics(aside)) == len(metrics(directory))


def test_settings_that_a_resumed_run_changed_outlast_a_damaged_checkpoint(tmp_path: Path) -> None:
    """It stops before the step of the damaged one, whose settings are those of before."""
    saves = ("total_steps=600", "checkpoint.every=150", "eval.every=200", "run_dir=run")
    directory, _, _ = run(tmp_path, *saves)
    [*_, damaged] = sorted((directory / "checkpoints").iterdir())
    os.truncate(damaged / "agent.safetensors", 100)
    longer = ("resume=run", "total_steps=900", "callbacks=[own_callbacks:StopAt500]")
    _, summary, _ = run(tmp_path, *longer, quick=False)
    assert summary["steps"] == 500
    aside = directory / "set-aside" / "600-steps"
    assert (aside / "checkpoints" / damaged.name).is_dir() and (aside / "policy").is_dir()
    _, summary, _ = run(tmp_path, "resume=run", "callbacks=[]", quick=False)
    assert (summary["status"], summary["steps"]) == ("finished", 900)


def test_a_finished_run_without_checkpoints_is_not_restarted(tmp_path: Path) -> None:
    directory, _, _ = run(tmp_path, "total_steps=300", "run_dir=run")
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(CheckpointError, match="is over"):
        job(tmp_path, "total_steps=300", "resume=auto")


def fingerprint(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in directory.rglob("*")
        if path.name != ".lock"
    }


def test_a_damaged_checkpoint_is_never_replaced_by_a_restart(
    copy_: Path,
) -> None:
    [*_, newest] = sorted((copy_ / "run" / "checkpoints").iterdir())
    for old in (copy_ / "run" / "checkpoints").iterdir():
        if old != newest:
            shutil.rmtree(old)
    content = bytearray((newest / "agent.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "agent.safetensors").write_bytes(content)
    before = fingerprint(copy_ / "run")
    _, _, printed = run(copy_, "resume=run", "total_steps=700", quick=False, code=3)
    assert "agent.safetensors: is damaged" in printed
    assert fingerprint(copy_ / "run") == before


def test_init_from_loads_the_weights_of_a_policy(finished: Path, tmp_path: Path) -> None:
    short = ("total_steps=50", "agent.learning_starts=1000", "eval.every=0")
    directory, _, printed = run(tmp_path, *short, f"init_from={finished / 'run'}")
    score = json.loads((finished / "run" / SUMMARY).read_text())["eval_return_mean"]
    line = f"initial weights: {finished / 'run/policy'} (step 600, evaluated return {score:.1f})"
    assert line in printed and line in (directory / "train.log").read_text()
    one, other = (
        load_file(path / "policy" / "policy.safetensors") for path in (finished / "run", directory)
    )
    assert {name: tensor.tolist() for name, tensor in one.items()} == {
        name: tensor.tolist() for name, tensor in other.items()
    }
    refused = (f"init_from={finished / 'run'}", "agent=ppo", "run_dir=another")
    _, _, printed = run(tmp_path, "env=cartpole", *refused, quick=False, code=3)
    assert "agent is dqn there and ppo here" in printed
    assert not (tmp_path / "another").exists()


def test_init_from_refuses_other_actions_of_as_many_outputs(tmp_path: Path) -> None:
    ppo = ("agent=ppo", "env.id=odd_actions:Odd-v0", "device=cpu", "agent.compile=false",
           "agent.rollout_steps=64", "eval.every=0", "total_steps=64")  # fmt: skip
    first, _, _ = run(tmp_path, *ppo, quick=False)
    for kind, shown in (("binary", "MultiBinary(n=6)"), ("several", "MultiDiscrete(nvec=[2,3])")):
        other = (f"env.kwargs.kind={kind}", f"init_from={first}", "run_dir=another")
        _, _, printed = run(tmp_path, *ppo, *other, quick=False, code=3)
        assert f"fit this run: actions are Discrete(n=6) there and {shown} here" in printed
        assert not (tmp_path / "another").exists()
    wider = ("env.kwargs.kind=wide", "run_dir=wider")
    narrow, _, _ = run(tmp_path, *ppo, "env.kwargs.kind=narrow", "run_dir=narrow", quick=False)
    run(tmp_path, *ppo, *wider, f"init_from={narrow}", quick=False)  # other bounds alone


def test_a_run_from_a_policy_with_statistics_resumes_exactly(tmp_path: Path) -> None:
    """The count of normalised observations goes on from the policy's, beyond the run's steps."""
    ppo = ("agent=ppo", "env=pendulum", "env.num_envs=2", "device=cpu", "agent.compile=false",
           "agent.rollout_steps=64", "agent.normalize_obs=true", "eval.every=0")  # fmt: skip
    for name in ("first", "whole", "again"):
        (tmp_path / name).mkdir()
    first, _, _ = run(tmp_path / "first", *ppo, "total_steps=512", quick=False)
    saved = ("total_steps=384", "checkpoint.every=128", "checkpoint.keep=all")
    whole, expected, _ = run(tmp_path / "whole", *ppo, *saved, f"init_from={first}", quick=False)
    earlier = whole / "checkpoints" / "step-000000000128"
    chosen = (f"resume={earlier}", "run_dir=here")
    _, summary, _ = run(tmp_path / "again", *chosen, quick=False)
    assert summary["resumed_from_step"] == 128
    assert summary["weights_sha256"] == expected["weights_sha256"]


def test_init_from_knows_the_home_directory(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(finished))
    saved = load_file(finished / "run" / "policy" / "policy.safetensors")
    with open_run(job(tmp_path, 'init_from="~/run"', "eval.every=0")) as (_, _, agent):
        weights = agent.weights()
        assert all(weights[name].equal(tensor) for name, tensor in saved.items())


def test_a_second_run_in_the_directory_is_rejected_unchanged(copy_: Path) -> None:
    import fcntl

    before = fingerprint(copy_ / "run")
    with open(copy_ / "run" / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        _, _, printed = run(copy_, "resume=run", "total_steps=900", quick=False, code=6)
    assert "another run is using this directory" in printed
    assert fingerprint(copy_ / "run") == before
