"""Fixture: a sweep whose jobs end as a test says."""

import json
import sys
from types import SimpleNamespace

import pytest

from steadyrl.training.checkpoints.run_directory import SUMMARY, RunDirectory
from steadyrl.training.cli.main import main


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
