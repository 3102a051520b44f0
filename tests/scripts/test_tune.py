"""A study is refused before its first trial, or goes on until it has all of them."""

import json
import os
import signal
import subprocess
import sys

import pytest
from command import ROOT, environment

from scripts import tune
from training.search_space import Range, StudyError, typed

STUDY = {
    "name": "test_study",
    "overrides": ["agent=ppo", "env=cartpole", "total_steps=2000", "eval.every=1000"],
    "space": {"agent.gamma": {"low": 0.9, "high": 0.99}},
}


def written(folder, **changes):
    path = folder / "study.yaml"
    path.write_text(json.dumps(STUDY | {"folder": str(folder / "study")} | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"space": {"agent.gama": [0.9, 1]}}, ["agent.gama", "agent.gamma"]),
        ({"space": {"agent.gamma": {"low": 0.9, "high": 7}}}, ["agent.gamma=7", "between 0 and 1"]),
        ({"space": {"agent.gamma": {"low": 0.9, "high": 0.1}}}, ["space.agent.gamma", "below"]),
        ({"space": {"agent.gamma": {"low": 0, "high": 1, "log": True}}}, ["above 0"]),
        ({"space": {"agent.gamma": 3}}, ["space.agent.gamma", "low: …"]),
        ({"space": {}}, ["space", "needs keys"]),
        ({"spaces": {}}, ["spaces", "did you mean space"]),
        ({"overrides": ["agent=ppoo"]}, ["agent=ppoo", "ppo"]),
        ({"overrides": ["eval.every=0"]}, ["eval.every=0", "evaluations"]),
        ({"pruner": "sharp"}, ["pruner=sharp", "asha"]),
        ({"trials": "many"}, ["trials=many"]),
        ({"name": "cartpole_ppo"}, ["name=cartpole_ppo", "preset already"]),
        ({"name": "../x"}, ["name=../x", "letters"]),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(tmp_path, capsys, changes, words):
    with pytest.raises(SystemExit) as ended:
        tune.main([str(written(tmp_path, **changes))])
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(printed.splitlines()) == 1
    for word in words:
        assert word in printed
    assert not (tmp_path / "study").exists()


def test_values_are_typed_as_the_command_line_reads_them():
    assert typed("agent.gamma", 0.1 + 0.2) == "agent.gamma=0.30000000000000004"
    assert typed("agent.hidden", [64, 64]) == "agent.hidden=[64,64]"
    assert typed("agent.clip_value", True) == "agent.clip_value=true"
    assert typed("agent.activation", "tanh") == "agent.activation='tanh'"
    assert Range(low=1, high=20).whole and not Range(low=1, high=2.0).whole


def test_another_study_of_the_same_name_is_refused(tmp_path):
    pytest.importorskip("optuna")
    plan = tune.read_plan(written(tmp_path))
    tune.open_study(plan)
    other = tune.read_plan(written(tmp_path, seeds=[7]))
    with pytest.raises(StudyError, match="holds another study called test_study"):
        tune.open_study(other)
    tune.open_study(plan)  # the same one goes on


def test_a_storage_that_cannot_be_used_is_refused(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "journal").write_text("no journal\n")
    plan = tune.read_plan(written(tmp_path, storage=str(tmp_path / "journal")))
    with pytest.raises(StudyError, match="cannot be used"):
        tune.open_study(plan)


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_to_its_end(tmp_path):
    pytest.importorskip("optuna")
    study = written(
        tmp_path, trials=3, seeds=[0], check_seeds=[9], pruner="none", name="test_study_killed"
    )
    command = [sys.executable, str(ROOT / "scripts" / "tune.py"), str(study)]
    preset = ROOT / "configs" / "experiment" / "test_study_killed.yaml"
    try:
        first = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        assert "study: 1/3 trials done" in first.stdout.readline()
        while not (tmp_path / "study" / "trials" / "1" / "seed-0" / "config.yaml").exists():
            os.sched_yield()
        first.send_signal(signal.SIGKILL)
        first.communicate()
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "trial 1 was cut short: it goes on" in done.stdout
        assert "study: 3/3 trials done" in done.stdout
        assert "| seed | best | default |" in done.stdout
        assert "gamma:" in preset.read_text()
    finally:
        preset.unlink(missing_ok=True)
    assert (tmp_path / "study" / "history.png").stat().st_size > 1000
