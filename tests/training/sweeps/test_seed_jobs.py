"""Which runs of `seeds=[…]` are new, continue or are finished, and their settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from opened import job

from steadyrl.training.sweeps.seed_jobs import compile_if_worthwhile
from tests.training.sweeps.test_seeds import command, summary


def finished_run(job: Any) -> SimpleNamespace:
    """Write the files of a finished run that scored ten times its seed."""
    job.directory.mkdir(parents=True)
    (job.directory / "config.yaml").write_text(yaml.safe_dump(job.config))
    seed, steps = job.settings.run.seed, job.settings.run.total_steps
    summary_ = {"status": "finished", "seed": seed, "steps": steps, "eval_return_mean": 10.0 * seed}
    (job.directory / "summary.json").write_text(json.dumps(summary_))
    return SimpleNamespace(exit_code=0, score=10.0 * seed)


def test_a_sweep_trains_the_unfinished_seeds_of_each_job(tmp_path: Path) -> None:
    typed = ("-m", "agent.gamma=0.9,0.99", "seeds=[1,2]", f"hydra.sweep.dir={tmp_path}")
    assert command(*typed, run=finished_run) == 0
    found = json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert [job["score"] for job in found] == [15.0, 15.0]
    places = [Path(job["run_dir"]) for job in found]
    assert len({path.parent for path in tmp_path.rglob("seed-*/config.yaml")}) == 4
    (places[1] / "summary.json").unlink()  # as if killed before all had ended
    shutil.rmtree(places[1] / "seed-2")
    for path in (tmp_path / ".jobs").glob("*.json"):
        stored = json.loads(path.read_text())
        if stored["run_dir"] == str(places[1]):
            path.write_text(json.dumps({**stored, "status": "interrupted"}))
    started: list[Path] = []
    assert command(*typed, run=lambda job: started.append(job.directory) or finished_run(job)) == 0
    assert started == [places[1] / "seed-2"]


@pytest.mark.parametrize("poison", ["x", [1], {"a": 1}, 10**400])
def test_a_seed_whose_summary_holds_anything_is_trained_again(tmp_path: Path, poison: Any) -> None:
    typed = ("seeds=[1,2]", f"run_dir={tmp_path / 'many'}")
    assert command(*typed, run=finished_run) == 0
    file = tmp_path / "many" / "seed-1" / "summary.json"
    file.write_text(
        json.dumps(dict.fromkeys(json.loads(file.read_text()), poison) | {"status": "finished"})
    )
    assert command(*typed, "resume=auto", run=finished_run_again) == 0
    assert summary(tmp_path / "many")["eval_return_mean"] == 15.0


@pytest.mark.parametrize("finished", [True, False])
def test_a_renamed_seed_is_not_the_run_of_another(
    tmp_path: Path, finished: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    many = tmp_path / "many"
    assert command("seeds=[0]", f"run_dir={many}", run=finished_run) == 0
    (many / "seed-0").rename(many / "seed-5")
    if not finished:
        (many / "seed-5" / "summary.json").unlink()
    assert command("seeds=[0,5]", f"run_dir={many}", "resume=auto", run=finished_run) == 2
    assert f"run_dir={many}: seed-5 holds the run of seed 0; rename it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["summary.json", "report.html"])
def test_files_of_others_are_not_overwritten(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine")
    (tmp_path / "policy").mkdir()  # which only the runs inside write
    (tmp_path / "policy" / "net.py").touch()
    assert command("seeds=[1]", f"run_dir={tmp_path}", run=finished_run) == 2
    assert f"holds {name}, which a run writes itself" in capsys.readouterr().err
    (tmp_path / name).unlink()
    assert command("seeds=[1]", f"run_dir={tmp_path}", run=finished_run) == 0


def finished_run_again(job: Any) -> SimpleNamespace:
    shutil.rmtree(job.directory)
    return finished_run(job)


def test_seeds_that_a_callback_has_ended_are_done_unless_they_get_longer(tmp_path: Path) -> None:
    typed = ("seeds=[1,2]", "total_steps=900", f"run_dir={tmp_path / 'many'}")

    def stopped_run(job: Any) -> SimpleNamespace:
        ended = finished_run_again(job) if job.directory.exists() else finished_run(job)
        file = job.directory / "summary.json"
        file.write_text(json.dumps(summary(job.directory) | {"steps": 500, "stopped_by": "mine"}))
        started.append(job.settings.run.seed)
        return ended

    started: list[int] = []
    assert command(*typed, run=stopped_run) == 0
    shutil.rmtree(tmp_path / "many" / "seed-2")
    assert command(*typed, "resume=auto", run=stopped_run) == 0
    assert command(*typed, "resume=auto", "total_steps=700", run=stopped_run) == 0
    assert started == [1, 2, 2]
    assert command(*typed, "resume=auto", "total_steps=1000", run=stopped_run) == 0
    assert started == [1, 2, 2, 1, 2]


@pytest.mark.machinery
@pytest.mark.parametrize(("steps", "compiled"), [(99_000, "auto"), (100_000, "true")])
def test_auto_compiles_when_it_pays_off_over_all_seeds(steps: int, compiled: str) -> None:
    few = ("agent.compile=auto", f"total_steps={steps}", "device=cpu", "agent.train_every=10",
           "agent.updates_per_train=1", "agent.hidden=[4]")  # fmt: skip
    accepted = job(Path("nowhere"), *few, quick=False)
    started = accepted._replace(continues=())
    chosen, continued = compile_if_worthwhile([accepted, started], 5)
    assert chosen.settings.agent.compile == chosen.config["agent"]["compile"] == compiled
    assert continued is started
    assert compile_if_worthwhile([accepted], 1) == [accepted]
    assert accepted.config["agent"]["compile"] == "auto"
