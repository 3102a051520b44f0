"""A sweep of many jobs keeps only their results in memory."""

import errno
import gc
import os
import sys
import weakref
from types import SimpleNamespace

import pytest

from steadyrl.training.cli.main import main


def test_configurations_of_finished_jobs_are_freed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=0,1,2,3"])
    configs, alive = [], []

    def train(job):
        gc.collect()
        alive.append(sum(each() is not None for each in configs))
        configs.append(weakref.ref(job.hydra["config"]))
        return SimpleNamespace(exit_code=0, score=float(job.settings.run.seed))

    main(train)
    assert alive == [0, 0, 0, 0]


def test_a_disk_that_fills_during_a_sweep_is_named_with_the_file(tmp_path, monkeypatch, capsys):
    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def train(job):
        monkeypatch.setattr("steadyrl.training.sweeps.jobs.write_atomic", full)
        return SimpleNamespace(exit_code=0, score=1.0)

    sweep = tmp_path / "sweep"
    typed = ["train.py", "-m", "seed=1,2", "env=cartpole", f"hydra.sweep.dir={sweep}"]
    monkeypatch.setattr(sys, "argv", typed)
    with pytest.raises(SystemExit) as ended:
        main(train)
    out, err = capsys.readouterr()
    reason = "cannot be written: No space left on device; the same command resumes"
    assert ended.value.code == 2
    assert err.startswith(f"error: {sweep}/") and reason in err
    assert f"error: {sweep}/.jobs/" in out  # where it was noticed
