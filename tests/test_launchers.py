"""Sweeps of real runs that diverge, fail or are killed, with each launcher."""

import importlib.util
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from command import start

HANGS = 300  # seconds until processes count as left running
GAMMAS = "0.9,0.91,0.92,0.93,0.94,0.95"


def run_six_jobs(folder, launcher):
    process = start(
        folder, "-m", f"agent.gamma={GAMMAS}", "agent=ppo", "env.id=fated_env:Fated-v0",
        "env.kwargs.number=${agent.gamma}", f"env.kwargs.mark={folder}/mark", "env.backend=sync",
        "env.max_restarts=0", "total_steps=1500", "eval.every=1000", "eval.episodes=2",
        "checkpoint.every=500", "hydra.sweep.dir=all", f"hydra/launcher={launcher}", quick=False,
    )  # fmt: skip
    out, err = process.communicate()
    return process.returncode, out + err


def statuses(folder):
    jobs = json.loads((folder / "all" / "sweep.json").read_text())["jobs"]
    return [job["status"] for job in jobs]


def require(launcher):
    package = f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher"
    if launcher != "basic" and importlib.util.find_spec(package) is None:
        pytest.skip(f"{launcher} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_a_sweep_of_failing_jobs_is_completed_on_rerun(tmp_path, launcher):
    pytest.importorskip("hydra_plugins") if launcher != "basic" else None
    require(launcher)
    code, printed = run_six_jobs(tmp_path, launcher)
    if launcher == "basic":  # the job runs in the sweep's process
        assert code == -signal.SIGKILL
    else:
        assert code == 5, printed
        finished = "finished"
        assert statuses(tmp_path) == [finished, finished, "diverged", "killed", finished, "failed"]
    names = ("all/agent.gamma-0.9__job-0", "all/agent.gamma-0.91__job-1")
    before = [(tmp_path / name / "summary.json").stat().st_mtime_ns for name in names]
    code, printed = run_six_jobs(tmp_path, launcher)
    assert code == 5, printed
    assert statuses(tmp_path) == [
        "finished",
        "finished",
        "diverged",
        "finished",
        "finished",
        "failed",
    ]
    assert [(tmp_path / name / "summary.json").stat().st_mtime_ns for name in names] == before
    resumed = json.loads((tmp_path / "all/agent.gamma-0.93__job-3/summary.json").read_text())
    assert resumed["resumed_from_step"] == 500
    shutil.rmtree(tmp_path / "all")


def start_parallel(folder, *overrides):
    """Start four jobs with joblib, two at a time, and return when one trains."""
    pytest.importorskip("hydra_plugins")
    require("joblib")
    process = start(
        folder, "-m", "seed=0,1,2,3", "agent=ppo", "total_steps=4000000", "eval.every=0",
        "hydra.sweep.dir=all", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *overrides,
        quick=False,
    )  # fmt: skip
    line = ""
    while "steps/s" not in line:  # a run is training
        line = process.stdout.readline()
        assert line, process.stderr.read()
    return process


def processes_of(folder):
    return [_command(each) for each in psutil.process_iter() if str(folder) in _command(each)]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_saves_parallel_jobs(tmp_path, jobs):
    process = start_parallel(tmp_path, f"hydra.launcher.n_jobs={jobs}")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, out + err
    found = statuses(tmp_path)
    assert found.count("waiting") == 4 - jobs and "interrupted" in found
    assert not processes_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_sweep_leaves_no_processes_or_shared_memory(tmp_path, jobs):
    before_ = set(Path("/dev/shm").iterdir())
    process = start_parallel(tmp_path, f"hydra.launcher.n_jobs={jobs}")
    tree = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    try:
        process.communicate(timeout=HANGS)  # until all processes have closed its output
    finally:
        _, alive = psutil.wait_procs(tree, timeout=60)
        for each in alive:  # none outlives the test
            each.kill()
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    assert not processes_of(tmp_path)
    new = set(Path("/dev/shm").iterdir()) - before_
    assert not [path for path in new if f"-{process.pid}-" in path.name or "joblib" in path.name]
    assert any((tmp_path / "all").glob("*/checkpoints/step-*"))  # they saved


@pytest.mark.slow
def test_a_sweep_under_nohup_survives_a_closed_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start_parallel(tmp_path, "total_steps=60000", "seed=0,1")
    finally:
        signal.signal(signal.SIGHUP, before)
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        each.send_signal(signal.SIGHUP)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert statuses(tmp_path) == ["finished", "finished"]


@pytest.mark.slow
def test_parallel_jobs_train_below_a_path_with_a_backslash(tmp_path):
    process = start_parallel(
        tmp_path, "seed=0,1", "total_steps=60000", "hydra.sweep.dir='a\\b c'"
    )  # fmt: skip
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["a\\b c"]
    assert len(list((tmp_path / "a\\b c").glob("seed-*/summary.json"))) == 2


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.slow
def test_sixty_jobs_in_one_process_leak_no_memory(tmp_path, monkeypatch):
    import sys

    from steadyrl.loop import train
    from steadyrl.training.cli.main import main

    monkeypatch.chdir(tmp_path)
    overrides = ["agent=ppo", "total_steps=256", "agent.rollout_steps=64", "eval.every=0"]
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=range(60)", "device=cpu", *overrides])
    seen = []

    def measured(job):
        result = train(job)
        seen.append(psutil.Process().memory_info().rss / 1024)
        return result

    main(measured)
    slope = np.polyfit(np.arange(55), seen[5:], 1)[0]  # after the first ones have loaded modules
    assert slope < 20, f"{slope:.1f} KB a job"
