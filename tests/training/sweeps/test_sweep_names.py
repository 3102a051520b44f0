"""Names of a sweep's runs list the overrides that differ."""

import sys
from pathlib import Path
from types import SimpleNamespace

from steadyrl.training.cli.main import main


def run_sweep(monkeypatch, *arguments):
    """Return the directories and settings of a sweep's runs."""
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments])
    jobs = []

    def train(job):
        jobs.append((job.directory, job.settings))
        return SimpleNamespace(exit_code=0, score=0.0)

    main(train)
    return jobs


def test_run_directories_match_their_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = run_sweep(monkeypatch, "seed=4,1", "agent=ppo", "total_steps=2e3")
    names = [directory.name for directory, _ in jobs]
    assert sorted(names) == [
        "seed-1__job-1",
        "seed-4__job-0",
    ]
    for directory, settings in jobs:
        assert directory.name.startswith(f"seed-{settings.run.seed}__job-")
        # Below outputs/, so that one TensorBoard shows runs and sweeps.
        assert directory.parent.parent == tmp_path / "outputs" / "sweeps"
    # Before a run begins, only the sweep's own files exist.
    [sweep] = {directory.parent for directory, _ in jobs}
    assert {path.name for path in sweep.iterdir()} == {"multirun.yaml", "sweep.json", ".jobs"}


def test_a_configured_subdirectory_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = ("hydra.sweep.dir=all", "hydra.sweep.subdir='${seed}-of-mine'")
    [(directory, _)] = run_sweep(monkeypatch, "seed=4", *where)
    assert directory == Path(tmp_path / "all" / "4-of-mine")
