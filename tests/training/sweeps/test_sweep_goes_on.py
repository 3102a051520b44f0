"""Sweeps survive failing jobs, and run only unfinished jobs when run again."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from steadyrl.core.errors import NonFiniteError
from steadyrl.training.checkpoints.run_directory import SUMMARY, RunDirectory
from steadyrl.training.cli.main import main
from steadyrl.training.config.settings import completed
from steadyrl.training.run.signals import StoppedError
from steadyrl.training.sweeps.identity import counted, digest
from steadyrl.training.sweeps.jobs import SweepDirectory, SweepJob
from steadyrl.training.sweeps.progress import progress_line, table
from steadyrl.training.sweeps.watch import forward_signals


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """Return a function that runs a sweep whose jobs end as given by `fates`."""
    monkeypatch.chdir(tmp_path)

    def run(fates, *arguments):
        ran = []

        def train(job):
            seed = job.settings.run.seed
            ran.append((seed, job.settings.run.resume))
            fate = fates.get(seed, "finished")
            with RunDirectory(job.directory, continued=True) as directory:
                directory.renew({"config.yaml": "{}"})
                if isinstance(fate, BaseException):
                    raise fate
                summary = {"status": fate, "eval_return_mean": float(seed), "wall_seconds": 90.0}
                (directory.path / SUMMARY).write_text(json.dumps(summary))
            return SimpleNamespace(exit_code=0, score=float(seed))

        argv = ["train.py", "-m", "hydra.sweep.dir=all", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        code = 0
        try:
            main(train)
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return ran, code, captured.out + captured.err

    return run


def statuses(tmp_path):
    jobs = json.loads((tmp_path / "all" / "sweep.json").read_text())["jobs"]
    return {job["overrides"][0]: job["status"] for job in jobs}


def test_every_job_is_announced_and_listed_in_the_table(sweep, tmp_path):
    ran, code, printed = sweep({}, "seed=0,1", "agent=dqn,ppo")
    assert (len(ran), code) == (4, 0)
    assert "\njob 2/4: seed=0 agent=ppo\n" in printed
    assert "sweep: 4/4 done" in printed
    sweep_file = json.loads((tmp_path / "all" / "sweep.json").read_text())
    assert [job["score"] for job in sweep_file["jobs"]] == [0.0, 0.0, 1.0, 1.0]
    assert all(job["seconds"] >= 0 and job["status"] == "finished" for job in sweep_file["jobs"])


def test_a_repeated_sweep_runs_unfinished_and_new_jobs(sweep, tmp_path):
    ran, code, printed = sweep({1: NonFiniteError("no number"), 2: SystemExit(143)}, "seed=0,1,2,3")
    assert ([seed for seed, _ in ran], code) == ([0, 1, 2], 143)  # interrupted in the third
    assert statuses(tmp_path) == {
        "seed=0": "finished", "seed=1": "diverged", "seed=2": "interrupted", "seed=3": "waiting",
    }  # fmt: skip
    assert re.search(r"resume: .* -m 'hydra\.sweep\.dir", printed) is None
    ran, code, printed = sweep({}, "agent=dqn", "seed=4,3,2,1,0")  # in another order, with one more
    # Started jobs are resumed, finished ones skipped.
    assert (ran, code) == ([(4, None), (3, None), (2, "auto"), (1, "auto")], 0)
    assert "seed=0: finished before" in printed
    assert set(statuses(tmp_path).values()) == {"finished"}


def test_seconds_of_a_resumed_job_include_those_before(sweep, tmp_path):
    """The run counts them, whose first process lasted longer than the last one."""
    printed = sweep({1: SystemExit(143)}, "seed=0,1")[2]
    assert "since it was resumed" not in printed
    printed = sweep({}, "seed=0,1,2")[2]
    jobs = json.loads((tmp_path / "all" / "sweep.json").read_text())["jobs"]
    assert [job["seconds"] for job in jobs] == [90.0, 90.0, 90.0]
    assert "about 0:01:30 left" in printed
    assert re.search(r"sweep: 3/3 done, .*, \d+ s since it was resumed\n", printed)


def test_an_invalid_job_fails_and_the_others_run(sweep, tmp_path):
    """What only the job itself finds out: the environment is not there."""
    ran, code, printed = sweep({}, "env.id=CartPole-v1,Nope-v0,Acrobot-v1")
    assert (len(ran), code) == (2, 2)
    assert statuses(tmp_path)["env.id=Nope-v0"] == "failed"
    assert "error: env.id=Nope-v0: " in printed
    assert printed.strip().splitlines()[-1].startswith("error: 1 of 3 jobs did not finish")


@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        (["seed=0,-1,1"], ["error: seed=-1: must be 0 or more (no job was started)"]),
        (
            ["agent.learning_rate=1e-3,abc,-1", "seed=0,1"],
            [
                "error: agent.learning_rate=abc: must be a number (no job was started)",
                "  agent.learning_rate=-1: must be above 0",
            ],
        ),
    ],
)
def test_wrong_values_are_refused_before_the_first_job(sweep, tmp_path, typed, lines):
    ran, code, printed = sweep({}, *typed)
    assert (ran, code) == ([], 2)
    assert printed.splitlines() == lines
    assert [path.name for path in (tmp_path / "all").rglob("config.yaml")] == []
    ran, code, _ = sweep({}, "seed=0,1")  # in the same directory
    assert (len(ran), code) == (2, 0)


def test_jobs_with_other_settings_have_other_directories(sweep, tmp_path):
    sweep({}, "seed=0", "total_steps=2000")
    ran, _, _ = sweep({}, "seed=0", "total_steps=3000")
    assert ran == [(0, None)]
    # Logging settings do not make another run.
    ran, _, _ = sweep({}, "seed=0", "total_steps=3000", "log.every=10")
    assert ran == []
    assert len([path for path in (tmp_path / "all").iterdir() if path.is_dir()]) == 3


def test_any_swept_key_distinguishes_jobs(sweep, tmp_path):
    overrides = ("precision=float32,bf16", "agent.compile=false")
    ran, code, printed = sweep({}, *overrides)
    assert (len(ran), code) == (2, 0) and "job 2/2: precision=bf16" in printed
    assert sweep({}, *overrides)[0] == []


def test_jobs_sharing_a_directory_are_rejected_at_the_start(sweep, tmp_path):
    ran, code, printed = sweep({}, "seed=0,1", "run_dir=same")
    assert (ran, code) == ([], 2)
    assert "same: would be shared by two jobs, seed=0 and seed=1; leave it out" in printed


def test_a_job_with_a_removed_directory_is_run_again(sweep, tmp_path):
    sweep({}, "seed=0,1")
    for file in (tmp_path / "all" / "seed-1__job-1").iterdir():
        file.unlink()
    ran, code, _ = sweep({}, "seed=0,1")
    assert (ran, code) == ([(1, None)], 0)


def test_a_job_whose_process_ended_counts_as_killed(sweep, tmp_path):
    sweep({}, "seed=0")
    directory_ = SweepDirectory(tmp_path / "all")
    [job] = directory_.all()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    job.status, job.runner = "running", process.pid
    (tmp_path / "all" / job.name / "summary.json").unlink()
    directory_.write(job)
    assert [each.status for each in directory_.all()] == ["killed"]


@pytest.mark.parametrize("content", ["{", '{"jobs": []}', '{"format": 99, "jobs": []}', "[]"])
def test_a_sweep_directory_of_another_version_is_rejected(sweep, tmp_path, content):
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "sweep.json").write_text(content)
    ran, code, printed = sweep({}, "seed=0")
    assert (ran, code) == ([], 2)
    assert "was not written by a sweep of this version" in printed
    assert len(printed.strip().splitlines()) == 1


def test_a_missing_launcher_is_named_with_its_extra(sweep, monkeypatch):
    monkeypatch.setattr("steadyrl.training.cli.arguments._is_installed", lambda package: False)
    _, code, printed = sweep({}, "hydra/launcher=joblib", "seed=0,1")
    assert code == 2
    assert printed == (
        'error: hydra/launcher=joblib: needs the extra sweep: pip install -e ".[sweep]"\n'
    )


def test_the_progress_line_shows_counts_best_and_time_left():
    def job(status, score=None):
        return SweepJob("n", "a=1", [], "", "", status=status, score=score, seconds=60.0)

    jobs = [job("finished", 3.0), job("killed"), job("running"), job("waiting"), job("waiting")]
    assert progress_line(jobs, at_once=2) == (
        "sweep: 1/5 done, 1 running, 1 failed, best 3.0 (a=1), about 0:01:30 left"
    )


def test_the_last_jobs_of_many_at_once_take_as_long_as_one():
    jobs = [SweepJob("n", "", [], "", "", status="finished", seconds=60.0)] * 7
    jobs += [SweepJob("n", "", [], "", "", status="running")]
    assert progress_line(jobs, at_once=4).endswith("about 0:01:00 left")


def test_a_job_that_exits_with_0_has_failed(sweep, tmp_path):
    ran, code, printed = sweep({0: SystemExit(0)}, "seed=0,1")
    assert ([seed for seed, _ in ran], code) == ([0, 1], 4)
    assert statuses(tmp_path) == {"seed=0": "failed", "seed=1": "finished"}
    assert "its process exited with 0" in printed


def test_a_best_score_of_0_beats_negative_scores():
    jobs = [SweepJob("n", f"a={at}", [], "", "", status="finished", score=score, seconds=1.0)
            for at, score in enumerate((-2.0, 0.0, -1.0))]  # fmt: skip
    assert "best 0.0 (a=1)" in progress_line(jobs)


def stored_jobs(tmp_path):
    return {path: json.loads(path.read_text()) for path in (tmp_path / "all/.jobs").glob("*.json")}


def test_another_notation_of_a_number_is_the_same_job(sweep, tmp_path):
    sweep({}, "seed=0,1", "total_steps=100000", "agent.learning_rate=0.001")
    assert sweep({}, "seed=0,1", "total_steps=1e5", "agent.learning_rate=1e-3")[:2] == ([], 0)


def test_new_configuration_keys_keep_the_identity_of_jobs(sweep, tmp_path):
    typed = ("seed=0,1", "precision=float32,bf16")
    sweep({}, *typed)
    for path, job in stored_jobs(tmp_path).items():  # as written by a version with fewer keys
        for key in ("agent.replay.beta_end", "env.step_timeout", "agent.noisy.enabled"):
            job["counted"].pop(key, None)
        path.write_text(json.dumps({**job, "identity": digest(job["counted"])}))
    assert sweep({}, *typed)[:2] == ([], 0)
    ran, code, _ = sweep({}, *typed, "agent.noisy.enabled=true")  # another run
    assert (len(ran), code) == (4, 0)


def identity(values):
    return digest(counted(values))


def test_job_identity_uses_completed_settings():
    complete = completed({"agent": {"name": "ppo"}, "total_steps": "2e3"})
    partial_ = {**complete, "total_steps": 2000, "agent": {**complete["agent"]}}
    del partial_["agent"]["clip"], partial_["precision"]
    assert identity(complete) == identity(partial_)
    assert identity({**complete, "seed": 7}) != identity(complete)


def test_a_moved_sweep_resumes_in_place(sweep, tmp_path):
    sweep({1: SystemExit(143)}, "seed=0,1")
    shutil.move(tmp_path / "all", tmp_path / "moved")
    ran, code, _ = sweep({}, "seed=0,1", "hydra.sweep.dir=moved")
    assert (ran, code) == ([(1, "auto")], 0)
    assert not (tmp_path / "all").exists()
    found = json.loads((tmp_path / "moved" / "sweep.json").read_text())["jobs"]
    assert all(Path(job["run_dir"]).parent == tmp_path / "moved" for job in found)


@pytest.mark.parametrize(
    ("number", "sent"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGUSR2, signal.SIGUSR2),
    ],
)
def test_a_signal_ends_the_jobs_of_its_own_sweep_only(tmp_path, number, sent):
    """Another sweep of the same directory goes on.

    Slurm sends SIGUSR2 to jobs itself: another signal would be a second.
    """
    place, own, children = SweepDirectory(tmp_path), tmp_path / "own", []
    for stop in (own, tmp_path / "other"):
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        run_dir = tmp_path / stop.name
        place.write(
            SweepJob(
                stop.name, "", [], "", str(run_dir), status="running", stop=str(stop),
                pid=children[-1].pid, runner=os.getpid(), host=socket.gethostname(),
            )
        )  # fmt: skip
    with forward_signals(place, ["own", "other"], own) as received:
        os.kill(os.getpid(), number)
        assert children[0].wait() == -sent
        assert received == [number]
    children[1].communicate(b"\n")
    assert children[1].returncode == 0


def test_ctrl_c_leaves_jobs_of_slurm_alone(tmp_path, capfd):
    """Those that wait in its queue would find the mark, and do nothing."""
    place, stop = SweepDirectory(tmp_path), tmp_path / "stop"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        place.write(
            SweepJob(
                "own", "", [], "", str(tmp_path / "own"), status="running", stop=str(stop),
                pid=child.pid, runner=os.getpid(), host=socket.gethostname(),
            )
        )  # fmt: skip
        with pytest.raises(StoppedError), forward_signals(place, ["own"], stop, detached=True):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        assert not stop.exists()
        assert "scancel" in capfd.readouterr().out
        child.communicate(b"\n")
    assert child.returncode == 0


def test_globs_choose_presets(sweep):
    ran, code, _ = sweep({}, "agent=ppo", "seed=4", "env=glob(mountaincar*)")
    assert code == 0 and len(ran) > 1


def test_a_subdirectory_by_number_is_no_error_at_the_end(sweep):
    ran, code, printed = sweep({}, "seed=0,1", "hydra.sweep.subdir=${hydra.job.num}")
    assert (len(ran), code) == (2, 0), printed


def test_small_scores_keep_their_digits():
    jobs = [SweepJob("n", "a=1", [], "", "", status="finished", score=0.0123, seconds=1.0)]
    assert "best 0.0123 (a=1)" in progress_line(jobs) and "  0.0123  " in table(jobs)
