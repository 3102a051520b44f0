"""Errors of failing environments name the traceback's log and the kind of environment."""

import re

import pytest
from opened import job

from steadyrl.envs.faults import Faults
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.loop import loop
from steadyrl.training.checkpoints.manifest import saved_below
from steadyrl.training.run.collector import build_collector
from steadyrl.training.setup import open_run


def failure_of(folder, where, late, *overrides):
    run_job = job(
        folder,
        "env.id=failing_envs:Failing-v0",
        f"++env.kwargs={{where: {where}, late: {late}}}",
        "env.max_restarts=0",
        *overrides,
    )
    with pytest.raises(EnvironmentFailedError) as caught, open_run(run_job) as (run, env, agent):
        loop(run, build_collector(run, env, agent))
    return str(caught.value)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(("where", "late"), [("reset", 0), ("step", 12)])
def test_the_error_names_file_line_and_log_with_traceback(tmp_path, backend, where, late):
    message, *below = failure_of(tmp_path, where, late, f"env.backend={backend}").splitlines()
    log = tmp_path / "run/train.log"
    assert "environment 0 failed at step" in message and "failing_envs.py:" in message
    assert message.endswith(f"the traceback is in {log}")
    text = log.read_text()
    assert "Traceback (most recent call last)" in text and "in look_up" in text
    assert "not rebuilt" not in message  # env.max_restarts=0 says that already
    assert len(below) == (where == "step")  # a checkpoint to go on from is saved after the reset


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_run_that_fails_says_why_what_is_lost_and_how_to_go_on(tmp_path, backend, capsys):
    chosen = ("env.max_restarts=2", "checkpoint.every=10", f"env.backend={backend}")
    message, below = failure_of(tmp_path, "step", 13, *chosen).splitlines()
    shown = "".join(capsys.readouterr())
    assert shown.count("; rebuilding it") == 2
    assert "; not rebuilt: env.max_restarts=2 within an hour is used up; the traceback" in message
    steps = int(re.search(r"failed at step (\d+)", message)[1])
    saved = saved_below(tmp_path / "run/checkpoints")[0].step
    assert f"lost: {steps - saved} steps since the checkpoint of step {saved}\n" in shown
    command = f"resume={tmp_path / 'run'} env.id=failing_envs:Failing-v0"
    assert below.startswith("  go on: ") and below.endswith(command)


def test_the_error_names_evaluation_environments(tmp_path):
    message = failure_of(
        tmp_path,
        "step",
        30,
        "total_steps=20",
        "eval.every=10",
        "eval.episodes=8",
        "eval.num_envs=1",
    )
    assert "evaluation's environment 0 failed at step" in message and "traceback is in" in message


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_the_error_counts_environment_steps_as_the_run_does(tmp_path, backend):
    kwargs = "++env.kwargs={where: step, late: 12}"
    run_job = job(
        tmp_path, "env.id=failing_envs:Failing-v0", kwargs, "env.max_restarts=0", "env.num_envs=3",
        f"env.backend={backend}",
    )  # fmt: skip
    with pytest.raises(EnvironmentFailedError) as caught, open_run(run_job) as (run, env, agent):
        loop(run, build_collector(run, env, agent))
    assert run.steps % 3 == 0 and run.steps > 12
    assert f"environment 0 failed at step {run.steps} of the run: " in str(caught.value)


def test_a_block_of_compiled_steps_names_the_step_within_it():
    faults = Faults(max_restarts=0)
    faults.counted, faults.ahead = lambda: 4000, 12
    error = faults.non_finite_error("reward", 0, "it is nan")
    assert "is not finite at step 4,012 of the run: " in str(error)
