"""A run in a process of its own tells its parent how it went."""

import json
import os
import subprocess
import time

import pytest
from command import QUICK

from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.training.checkpoints.run_directory import SUMMARY
from steadyrl.training.run.job import compose_one
from steadyrl.training.sweeps import subprocess_run as children
from steadyrl.training.sweeps.subprocess_run import RunProcess, quoted
from steadyrl.training.tuning.members import MemberError, train_generation


def begun(directory, *overrides):
    return RunProcess([*QUICK, *overrides], directory, output=subprocess.DEVNULL)


def test_a_score_is_that_of_this_attempt_whatever_clocks_say(tmp_path):
    child = begun(tmp_path / "run", "total_steps=300", "eval.every=300")
    child.process.wait()
    hour_ago = time.time() - 3600  # by the clock of another machine, or of this one set back
    os.utime(tmp_path / "run" / SUMMARY, (hour_ago, hour_ago))
    first = child.wait()
    assert first.status == "finished" and first.score is not None
    os.utime(tmp_path / "run" / SUMMARY)
    refused = begun(tmp_path / "run", "total_steps=300", "eval.every=300", "seed=7").wait()
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
    """Return a function that puts a program in the place of train.py, which ends at once."""
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")

    def put(code, summary=None):
        text = json.dumps(summary) if summary else ""
        (tmp_path / "train.py").write_text(ENDS % (text, text, code))

    return put


@pytest.mark.parametrize("summary", [None, {"status": "interrupted", "eval_return_mean": 3.0}])
def test_a_process_that_ends_with_0_and_leaves_no_finished_run_has_failed(
    program, tmp_path, summary
):
    program(0, summary)
    outcome = begun(tmp_path / "run").wait()
    assert (outcome.status, outcome.score) == ("failed", None)
    assert outcome.exit_code == EnvironmentFailedError.exit_code
    assert "its summary.json does not say finished" in outcome.error


def test_the_summary_of_an_earlier_attempt_finishes_nothing(program, tmp_path):
    whole = {"status": "finished", "eval_return_mean": 0.0}
    program(0, whole)
    first = begun(tmp_path / "run").wait()
    assert (first.status, first.score) == ("finished", 0.0)
    program(0)
    assert begun(tmp_path / "run").wait().status == "failed"


def test_a_member_that_ends_without_a_word_is_no_member(program, tmp_path):
    program(0)
    with pytest.raises(MemberError, match="generation 1: failed: its process exited with 0"):
        train_generation(tmp_path / "all", "a", 1, None, [], {}, 256)


@pytest.mark.parametrize(
    "text", ["a", "it's", "a\\b", "a\\\\b", "end\\", "\\'", "a b,c={d}", "x\\'y\\\\"]
)
def test_a_quoted_text_is_read_as_it_was(text):
    assert compose_one([f"run_dir={quoted(text)}"]).run_dir == text
