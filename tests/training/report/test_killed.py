"""A run that was killed near a memory limit says so when it is resumed, and in its report."""

import json

import pytest
from opened import job
from written_runs import write_run

from steadyrl.loop import train
from steadyrl.training.analysis.past_runs import read_run
from steadyrl.training.report.endings import ending
from steadyrl.training.report.killed import memory_near_limit

RUN = ("agent.learning_starts=1000", "eval.every=0", "log.every=50", "report.at_end=false")
SAID = "at step 150, its last reading, it used 740 MB of memory and 42.0 MB were left below"


def reading(step, used, left, swapped=0.0):
    """Return a line of metrics."""
    values = {
        "step": step,
        "wall_seconds": 1.0,
        "memory/tree_pss_mb": used,
        "memory/swap_mb": swapped,
        "memory/available_mb": left,
    }
    return json.dumps(values) + "\n"


def append(run, *lines):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(lines)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", {})


def test_the_newest_full_reading_counts(run):
    append(run, reading(100, 200.0, 5000.0), reading(150, 700.0, 42.0, swapped=40.0))
    append(run, '{"step": 200, "memory/rss_mb": 1.0}\n', '{"step": 250, "memory/tree')
    assert SAID in memory_near_limit(run)
    assert SAID in ending(read_run(run, ())).reason


def test_far_from_a_limit_nothing_is_said(run):
    append(run, reading(100, 740.0, 42.0), reading(150, 200.0, 36.0))
    assert memory_near_limit(run) is None


def test_a_run_that_ended_by_itself_was_not_killed(run):
    append(run, reading(150, 740.0, 42.0))
    (run / "summary.json").write_text('{"status": "failed"}')
    assert memory_near_limit(run) is None


@pytest.mark.parametrize("text", ["", "[]\n", '{"step": 1, "memory/available_mb": "much"}\n'])
def test_damaged_metrics_say_nothing(run, text):
    (run / "metrics.jsonl").write_text(text)
    assert memory_near_limit(run) is None
    (run / "metrics.jsonl").unlink()
    assert memory_near_limit(run) is None


@pytest.mark.parametrize("killed", [False, True])
def test_a_resumed_run_says_how_near_the_limit_was(tmp_path, killed):
    train(job(tmp_path, *RUN, "total_steps=100"))
    run = tmp_path / "run"
    append(run, reading(150, 740.0, 42.0))  # of steps that the kill lost
    if killed:
        (run / "summary.json").unlink()
    result = train(job(tmp_path, f"resume={run}", "total_steps=200", quick=False))
    assert result.summary.status == "finished" and result.summary.resumed_from_step == 100
    log = (run / "train.log").read_text()
    assert (f"the run was killed before it could end: {SAID}" in log) == killed
    assert ("now the nearest is the " in log) == killed
