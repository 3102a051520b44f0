"""Runs in subprocesses: score, exit code and errors as the parent sees them."""

import json
import os
import signal
import subprocess
import time

import pytest
from command import QUICK

from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.training.checkpoints.run_directory import SUMMARY
from steadyrl.training.run.job import compose_one
from steadyrl.training.run.signals import StoppedError
from steadyrl.training.run.watcher_process import ORPHANED
from steadyrl.training.sweeps import subprocess_run as children
from steadyrl.training.sweeps.subprocess_run import RunProcess, quoted, running
from steadyrl.training.sweeps.sweeper import worker_variables
from steadyrl.training.tuning.members import MemberError, train_generation


def start_run(directory, *overrides):
    return RunProcess([*QUICK, *overrides], directory, output=subprocess.DEVNULL)


@pytest.mark.long
def test_the_score_is_of_this_attempt_whatever_the_clock(tmp_path):
    child = start_run(tmp_path / "run", "total_steps=300", "eval.every=300")
    child.process.wait()
    hour_ago = time.time() - 3600  # as by another machine's clock
    os.utime(tmp_path / "run" / SUMMARY, (hour_ago, hour_ago))
    first = child.wait()
    assert first.status == "finished" and first.score is not None
    os.utime(tmp_path / "run" / SUMMARY)
    refused = start_run(tmp_path / "run", "total_steps=300", "eval.every=300", "seed=7").wait()
    assert (refused.exit_code, refused.score) == (2, None)


ENDS = """import os, sys
from pathlib import Path
[place] = [Path(t.partition("=")[2].strip("'")) for t in sys.argv if t.startswith("run_dir=")]
place.mkdir(parents=True, exist_ok=True)
(place / "summary.json").write_text(%r) if %r else None
os._exit(%d)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that replaces train.py by a program that ends at once."""
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")

    def replace_program(code, summary=None):
        text = json.dumps(summary) if summary else ""
        (tmp_path / "train.py").write_text(ENDS % (text, text, code))

    return replace_program


@pytest.mark.parametrize("summary", [None, {"status": "interrupted", "eval_return_mean": 3.0}])
def test_exit_code_0_without_a_finished_summary_is_a_failure(program, tmp_path, summary):
    program(0, summary)
    outcome = start_run(tmp_path / "run").wait()
    assert (outcome.status, outcome.score) == ("failed", None)
    assert outcome.exit_code == EnvironmentFailedError.exit_code
    assert "its summary.json does not say finished" in outcome.error


def test_the_summary_of_an_earlier_attempt_does_not_count(program, tmp_path):
    finished = {"status": "finished", "eval_return_mean": 0.0}
    program(0, finished)
    first = start_run(tmp_path / "run").wait()
    assert (first.status, first.score) == ("finished", 0.0)
    program(0)
    assert start_run(tmp_path / "run").wait().status == "failed"


def test_a_member_without_a_summary_has_failed(program, tmp_path):
    program(0)
    with pytest.raises(MemberError, match="generation 1: failed: its process exited with 0"):
        train_generation(tmp_path / "all", "a", 1, None, [], {}, 256)


@pytest.mark.parametrize(
    "text", ["a", "it's", "a\\b", "a\\\\b", "end\\", "\\'", "a b,c={d}", "x\\'y\\\\"]
)
def test_quoted_text_is_read_back_unchanged(text):
    assert compose_one([f"run_dir={quoted(text)}"]).run_dir == text


@pytest.mark.parametrize(("cards", "seen"), [(None, "5"), ("all", None), ("0,1", "0,1"), ("", "")])
def test_runs_see_the_cards_that_a_launcher_hides_from_its_processes(
    tmp_path, monkeypatch, cards, seen
):
    shown = "import os, json, sys; print(json.dumps(dict(os.environ)))"
    (tmp_path / "train.py").write_text(shown)
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")  # as Ray sets it
    if cards is not None:
        monkeypatch.setenv(children.CARDS, cards)
    run = RunProcess([], tmp_path / "run", output=subprocess.PIPE, at_once=3)
    found = json.loads(run.process.communicate()[0])
    assert found.get("CUDA_VISIBLE_DEVICES") == seen
    assert found["STEADYRL_RUNS_AT_ONCE"] == "3"


@pytest.mark.parametrize(
    ("number", "sent"),
    [
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR2, signal.SIGUSR2),
        (signal.SIGXCPU, signal.SIGXCPU),
    ],
)
def test_runs_get_the_signal_that_a_scheduler_sends_them_too(tmp_path, monkeypatch, number, sent):
    """Another one would be a second signal, after which they do not save."""
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")
    (tmp_path / "train.py").write_text("import signal; signal.pause()")
    with pytest.raises(StoppedError), running([], [0, 1], tmp_path / "trial") as runs:
        raise StoppedError(number)
    assert [run.process.returncode for run in runs] == [-sent, -sent]


ORPHAN = """
import ctypes, signal, sys
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value)
"""


def test_the_death_of_its_parent_is_no_second_signal_to_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")
    (tmp_path / "train.py").write_text(ORPHAN)
    run = RunProcess([], tmp_path / "run", output=subprocess.PIPE)
    assert int(run.process.communicate()[0]) == ORPHANED


def test_cores_are_divided_by_the_environment_and_not_by_a_setting(tmp_path, monkeypatch):
    shown = "import os, json, sys; print(json.dumps([sys.argv, dict(os.environ)]))"
    (tmp_path / "train.py").write_text(shown)
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")
    run = RunProcess(["seed=1"], tmp_path / "run", output=subprocess.PIPE, threads=3)
    arguments, variables = json.loads(run.process.communicate()[0])
    assert variables["OMP_NUM_THREADS"] == variables["NUMBA_NUM_THREADS"] == "3"
    assert not [text for text in arguments if text.startswith("threads=")]


def test_jobs_of_slurm_have_cores_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("steadyrl.training.sweeps.sweeper.usable_cores", lambda: 8)
    package = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
    local = worker_variables(f"{package}.LocalLauncher", tmp_path / "stop", 4)
    assert local["STEADYRL_SWEEP_THREADS"] == "2"
    slurm = worker_variables(f"{package}.SlurmLauncher", tmp_path / "stop", 4)
    assert slurm == {"STEADYRL_SWEEP_STOP": str(tmp_path / "stop")}
