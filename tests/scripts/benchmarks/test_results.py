"""`benchmark.py results`: lines of runs, which go on after a signal, and their check."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import benchmark
from scripts.benchmarks import results
from scripts.benchmarks.results import disagreement

ROOT = Path(__file__).parents[3]
TINY = ("total_steps=16_000", "agent.hidden=[16]", "agent.compile=false", "eval.every=16_000")
SUMMARY = {"weights_sha256": "abc", "episodes": 4_000}
LINE = {
    "command": "python train.py experiment=cartpole_dqn seed=0",
    "processor": "P",
    "versions": {"torch": "2"},
    "score": 100.0,
}


def lines(folder):
    data = folder / "results.jsonl"
    return [json.loads(each) for each in data.read_text().splitlines()] if data.exists() else []


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that measures with runs that end at once, with the scores given."""

    def call(*arguments, score=500.0, code=0, **others):
        def train(typed):
            run_dir = Path(next(each for each in typed if each.startswith("run_dir="))[8:])
            summary = {"env": "CartPole-v1", "seed": 3, "steps": 50_000, "wall_seconds": 12.34}
            summary |= {"eval_return_mean": score, "eval_return_std": 1.5, "eval_episodes": 20}
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "summary.json").write_text(json.dumps(summary | SUMMARY | others))
            return code

        monkeypatch.setattr(results, "train", train)
        places = ["--runs", str(tmp_path / "runs"), "--data", str(tmp_path / "results.jsonl")]
        benchmark.main(["results", *arguments, *places])

    return call


def test_a_finished_run_has_one_line_with_how_it_was_measured(measure, tmp_path, capsys):
    asked = ("cartpole_dqn", "3", "--set", "agent.hidden=[8, 8]")
    for _ in range(2):
        measure(*asked)
    [line] = lines(tmp_path)
    assert "has a line already" in capsys.readouterr().out
    assert line["command"] == "python train.py experiment=cartpole_dqn 'agent.hidden=[8, 8]' seed=3"
    assert (line["env"], line["seed"]) == ("CartPole-v1", 3)
    assert (line["score"], line["score_std"], line["episodes"]) == (500.0, 1.5, 20)
    assert (line["steps"], line["seconds"], line["weights_sha256"]) == (50_000, 12.3, "abc")
    assert {"commit", "date", "processor", "versions"} <= line.keys()


def test_overrides_make_another_experiment_but_another_environment_does_not(measure, tmp_path):
    measure("cartpole_dqn", "0", "--set", "env.id=Acrobot-v1", "total_steps=300")
    measure("cartpole_dqn", "0", "--set", "env.id=Acrobot-v1")
    named = [each["experiment"] for each in lines(tmp_path)]
    assert named == ["cartpole_dqn total_steps=300", "cartpole_dqn"]


def test_without_evaluations_the_score_is_of_training_episodes(measure, tmp_path):
    measure("minatar_breakout_dqn", "0", "--name", "other", eval_return_mean=None, return_mean=7.5)
    [line] = lines(tmp_path)
    assert (line["experiment"], line["score"], line["episodes"]) == ("other", 7.5, 100)


def test_a_run_that_did_not_finish_has_no_line_and_its_exit_code(measure, tmp_path):
    with pytest.raises(SystemExit) as end:
        measure("cartpole_dqn", "0", "1", code=143)
    assert end.value.code == 143 and not lines(tmp_path)


def test_a_run_does_not_go_on_at_another_commit(measure, tmp_path):
    with pytest.raises(SystemExit):
        measure("cartpole_dqn", "0", code=143)
    [began] = (tmp_path / "runs").glob("*.commit")
    began.write_text("0123456")
    with pytest.raises(SystemExit, match="began at commit 0123456, and this is "):
        measure("cartpole_dqn", "0")


def test_check_is_red_with_another_score_and_without_a_line(measure, tmp_path, capsys):
    with pytest.raises(SystemExit, match="has no line: python train"):
        measure("cartpole_dqn", "0", "--check")
    measure("cartpole_dqn", "0")
    measure("cartpole_dqn", "0", "--check")
    assert "agrees: python train.py" in capsys.readouterr().out and len(lines(tmp_path)) == 1
    with pytest.raises(SystemExit, match=r"499.5 instead of 500.0"):
        measure("cartpole_dqn", "0", "--check", score=499.5)


@pytest.mark.long
def test_a_run_ends_at_sigterm_and_goes_on(tmp_path):
    command = [sys.executable, "scripts/benchmark.py", "results", "cartpole_dqn", "1", "--set"]
    command += [*TINY, "--runs", str(tmp_path / "a folder")]
    command += ["--data", str(tmp_path / "results.jsonl")]
    process = subprocess.Popen(command, cwd=ROOT)
    while logged(tmp_path) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143 and not lines(tmp_path)
    subprocess.run(command, cwd=ROOT, check=True)
    [line] = lines(tmp_path)
    [summary] = [json.loads(path.read_text()) for path in tmp_path.rglob("summary.json")]
    assert 0 < summary["resumed_from_step"] < 16_000
    assert (line["score"], line["steps"]) == (summary["eval_return_mean"], 16_000)


def logged(folder):
    return sum(len(path.read_bytes().splitlines()) for path in folder.rglob("metrics.jsonl"))


def test_scores_are_equal_on_the_same_machine_and_near_on_another():
    assert disagreement(LINE, LINE) is None
    assert "100.1 instead of 100.0, with the same" in disagreement(LINE, LINE | {"score": 100.1})
    other = LINE | {"processor": "Q"}
    assert disagreement(LINE, other | {"score": 104.0}) is None
    assert "more than 5 %" in disagreement(LINE, other | {"score": 106.0})
    older = {key: value for key, value in LINE.items() if key != "versions"}
    assert disagreement(older, LINE | {"score": 104.0}) is None


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["cartpole_dqn", "cartpole_ppo"])
def test_a_line_of_the_results_can_be_rerun(experiment):
    command = [sys.executable, "scripts/benchmark.py", "results", experiment, "0", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
