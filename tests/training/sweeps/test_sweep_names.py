"""Runs of a sweep are called by what tells them apart."""

import glob
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from steadyrl.training.cli.main import main
from steadyrl.training.run.job import LONGEST, run_name


@pytest.mark.parametrize(
    ("job", "overrides", "typed", "name"),
    [
        (3, ["seed=1", "agent=ppo"], ["seed=0,1", "agent=dqn,ppo"], "agent-ppo__seed-1__job-3"),
        # What is the same for all is not said.
        (0, ["total_steps=20", "seed=0"], ["total_steps=20", "seed=0,1"], "seed-0__job-0"),
        (7, ["seed=0"], ["seed=0"], "job-7"),
        (0, [], [], "job-0"),
        # Slashes, brackets, quotes and spaces are not for file names.
        (1, ["hydra/launcher=basic"], ["hydra/launcher=basic,b"], "hydra.launcher-basic__job-1"),
        (0, ["env.id=ALE/Pong-v5"], ["env.id=ALE/Pong-v5,ALE/X"], "env.id-ALE-Pong-v5__job-0"),
        (0, ["agent.hidden=[64,64]"], ["agent.hidden=[64,64],[9]"], "agent.hidden-64-64__job-0"),
        (0, ["++env.kwargs.x='a b:c'"], ["++env.kwargs.x='a b:c',d"], "env.kwargs.x-ab-c__job-0"),
        # Nor is a plus, which must not turn into a minus.
        (0, ["agent.clip=1e+38"], [], "agent.clip-1e38__job-0"),
        (0, ["agent.clip=1e-38"], [], "agent.clip-1e-38__job-0"),
        # A sweeper's own keys are not typed, or typed as what they are drawn from.
        (12, ["agent.gamma=0.97"], [], "agent.gamma-0.97__job-12"),
        (12, ["agent.gamma=0.97"], ["agent.gamma=interval(0.9,1)"], "agent.gamma-0.97__job-12"),
        (2, ["experiment=cartpole_ppo"], ["experiment=glob(*)"], "experiment-cartpole_ppo__job-2"),
        (2, ["seed=4"], ["seed=range(5)"], "seed-4__job-2"),
    ],
)
def test_a_run_is_called_by_what_differs(job, overrides, typed, name):
    assert run_name(job, overrides, typed) == name


def test_a_name_is_never_too_long_for_a_file_system():
    overrides = [f"env.kwargs.some_long_keyword_{i}=value" for i in range(50)]
    name = run_name(123456, overrides, [])
    assert len(name.encode()) <= LONGEST + 20 < 255
    assert name.startswith("env.kwargs.some_long_keyword_0-value__")
    assert name.endswith("-value__job-123456")
    assert run_name(1, ["env.kwargs.x=" + "a" * 300], []) == "job-1"


def swept(monkeypatch, *arguments):
    """Return the directories of a sweep's runs, and what they were told."""
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments])
    jobs = []

    def train(job):
        jobs.append((job.directory, job.settings))
        return SimpleNamespace(exit_code=0, score=0.0)

    main(train)
    return jobs


def test_directories_sort_and_hold_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = swept(monkeypatch, "seed=4,1", "agent=ppo", "total_steps=2e3")
    names = [directory.name for directory, _ in jobs]
    assert sorted(names) == [
        "seed-1__job-1",
        "seed-4__job-0",
    ]
    for directory, settings in jobs:
        assert directory.name.startswith(f"seed-{settings.run.seed}__job-")
        # Where the runs are, so that one TensorBoard shows both.
        assert directory.parent.parent == tmp_path / "outputs" / "sweeps"
    # Nothing but the sweep's own files is made before a run begins.
    [sweep] = {directory.parent for directory, _ in jobs}
    assert {path.name for path in sweep.iterdir()} == {"multirun.yaml", "sweep.json", ".jobs"}


def test_a_name_that_is_typed_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = ("hydra.sweep.dir=all", "hydra.sweep.subdir='${seed}-of-mine'")
    [(directory, _)] = swept(monkeypatch, "seed=4", *where)
    assert directory == Path(tmp_path / "all" / "4-of-mine")


@pytest.mark.parametrize(
    "typed", ["hydra/launcher=basic", "env.id=a:b/C-v0", "x=[1,-2.5e+3]", "y='z'"]
)
def test_a_name_can_be_typed_after_resume_without_quotes(typed):
    name = run_name(5, [typed], [])
    assert OverridesParser.create().parse_override(f"resume=multirun/{name}").value() == (
        f"multirun/{name}"
    )
    assert shlex.quote(name) == name
    assert glob.escape(name) == name
