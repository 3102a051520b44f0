"""A sweep of many jobs keeps their results only."""

import gc
import sys
import weakref
from types import SimpleNamespace

from steadyrl.training.cli.main import main


def test_the_configuration_of_a_job_goes_when_the_job_is_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=0,1,2,3"])
    kept, alive = [], []

    def train(job):
        gc.collect()
        alive.append(sum(each() is not None for each in kept))
        kept.append(weakref.ref(job.hydra["config"]))
        return SimpleNamespace(exit_code=0, score=float(job.settings.run.seed))

    main(train)
    assert alive == [0, 0, 0, 0]
