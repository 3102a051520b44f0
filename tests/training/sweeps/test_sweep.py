"""A sweep of many jobs keeps only their results in memory."""

import gc
import sys
import weakref
from types import SimpleNamespace

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
