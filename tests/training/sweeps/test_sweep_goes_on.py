"""Sweeps survive failing jobs, and run only unfinished jobs when run again."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steadyrl.core.errors import NonFiniteError
from steadyrl.training.sweeps.jobs import SweepDirectory


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


def test_a_failed_job_has_not_finished_whatever_run_its_directory_holds(sweep, tmp_path):
    sweep({}, "seed=0,1")
    place = SweepDirectory(tmp_path / "all")
    for job in place.all():
        job.status, job.exit_code, job.score = "failed", 2, None
        place.write(job)
    assert [(job.status, job.score) for job in place.all()] == [("failed", None)] * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run_dir", "../elsewhere"),
        ("run_dir", "\ud800"),
        ("score", "x"),
        ("seconds", True),
        ("name", 5),
        ("identity", [1]),
        ("error", 5),
        ("overrides", "seed=1"),
        ("overrides", [1]),
        ("counted", []),
        ("unknown", 1),
    ],
)
def test_a_status_file_with_what_no_job_has_is_refused_by_its_name(sweep, tmp_path, key, value):
    sweep({1: SystemExit(143)}, "seed=0,1")
    for file in (tmp_path / "all" / ".jobs").glob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    ran, code, printed = sweep({}, "seed=0,1")
    assert (ran, code) == ([], 2)
    assert ".json: corrupted; remove it to run its job again" in printed
    assert len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("content", ["{", '{"jobs": []}', '{"format": 99, "jobs": []}', "[]"])
def test_a_sweep_directory_of_another_version_is_rejected(sweep, tmp_path, content):
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "sweep.json").write_text(content)
    ran, code, printed = sweep({}, "seed=0")
    assert (ran, code) == ([], 2)
    assert "was not written by a sweep of this version" in printed
    assert len(printed.strip().splitlines()) == 1


@pytest.mark.parametrize("content", ["", '{"jobs": [{"name"'])
def test_a_damaged_list_is_written_again_from_the_jobs(sweep, tmp_path, content):
    sweep({1: SystemExit(143)}, "seed=0,1")
    (tmp_path / "all" / "sweep.json").write_text(content)
    ran, code, _ = sweep({}, "seed=0,1")
    assert (ran, code) == ([(1, "auto")], 0)
    assert statuses(tmp_path) == {"seed=0": "finished", "seed=1": "finished"}


def test_a_missing_launcher_is_named_with_its_extra(sweep, monkeypatch):
    monkeypatch.setattr("steadyrl.training.cli.arguments._is_installed", lambda package: False)
    _, code, printed = sweep({}, "hydra/launcher=joblib", "seed=0,1")
    assert code == 2
    assert printed == (
        'error: hydra/launcher=joblib: needs the extra sweep: pip install -e ".[sweep]"\n'
    )


def test_a_job_that_exits_with_0_has_failed(sweep, tmp_path):
    ran, code, printed = sweep({0: SystemExit(0)}, "seed=0,1")
    assert ([seed for seed, _ in ran], code) == ([0, 1], 4)
    assert statuses(tmp_path) == {"seed=0": "failed", "seed=1": "finished"}
    assert "its process exited with 0" in printed


def test_a_moved_sweep_resumes_in_place(sweep, tmp_path):
    sweep({1: SystemExit(143)}, "seed=0,1")
    shutil.move(tmp_path / "all", tmp_path / "moved")
    ran, code, _ = sweep({}, "seed=0,1", "hydra.sweep.dir=moved")
    assert (ran, code) == ([(1, "auto")], 0)
    assert not (tmp_path / "all").exists()
    found = json.loads((tmp_path / "moved" / "sweep.json").read_text())["jobs"]
    assert all(Path(job["run_dir"]).parent == tmp_path / "moved" for job in found)


def test_globs_choose_presets(sweep):
    ran, code, _ = sweep({}, "agent=ppo", "seed=4", "env=glob(mountaincar*)")
    assert code == 0 and len(ran) > 1


def test_a_subdirectory_by_number_is_no_error_at_the_end(sweep):
    ran, code, printed = sweep({}, "seed=0,1", "hydra.sweep.subdir=${hydra.job.num}")
    assert (len(ran), code) == (2, 0), printed
