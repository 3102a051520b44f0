"""Several seeds in one command: each equals a single run, whatever happens to the others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import QUICK
from opened import job

import steadyrl.agents.learner.learner
import steadyrl.loop as train
from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import MemoryBudgetError, NonFiniteError, SettingError
from steadyrl.training.cli.main import main
from steadyrl.training.run.rank_info import NEEDED
from steadyrl.training.setup import open_run
from steadyrl.training.sweeps.jobs import SweepJob
from steadyrl.training.sweeps.seeds import write_summary
from tests.test_cut_short import metrics

SHORT = (*QUICK, "total_steps=300", "eval.every=200", "log.every=100", "threads=1",
         "eval.episodes=1",         "memory.monitor.tensors_every_seconds=1000")  # fmt: skip
PER_RUN_KEYS = (
    "run_dir",
    "steps_per_second",
    "wall_seconds",
    "rss_mb_peak",
    "tree_mb_peak",
    "resumed_from_step",
    "cleanings",
    "cleaned_mb",
)


def command(*arguments: str, run: Any = train.train) -> int:
    """Run a command in this process; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            main(run)
        except SystemExit as ended:
            return int(str(ended.code))
    return 0


def summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def result(directory: Path) -> dict[str, Any]:
    times = ("time_share_", "speed_trend_")
    found = summary(directory).items()
    return {k: v for k, v in found if k not in PER_RUN_KEYS and not k.startswith(times)}


def config(directory: Path) -> dict[str, Any]:
    found = yaml.safe_load((directory / "config.yaml").read_text())
    return {key: value for key, value in found.items() if key not in ("run_dir", "resume")}


@pytest.fixture(scope="module")
def single_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of single runs of seeds 3 and 5."""
    folder = tmp_path_factory.mktemp("alone")
    for seed in (3, 5):
        assert command(*SHORT, f"seed={seed}", f"run_dir={folder / str(seed)}") == 0
    return folder


def assert_equal_to_single_runs(many: Path, single_runs: Path) -> None:
    for seed in (3, 5):
        one, other = single_runs / str(seed), many / f"seed-{seed}"
        assert result(other) == result(one)
        assert metrics(other) == metrics(one)
        assert config(other) == config(one)
        assert names(other) == names(one)


def names(directory: Path) -> set[str]:
    return {path.name.partition(".tfevents")[0] for path in directory.iterdir()}


def test_each_seed_equals_a_single_run(
    single_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*SHORT, "seeds=[3,5]", f"run_dir={tmp_path / 'many'}") == 0
    assert_equal_to_single_runs(tmp_path / "many", single_runs)
    many_summary = summary(tmp_path / "many")
    scores = [summary(single_runs / str(seed))["eval_return_mean"] for seed in (3, 5)]
    assert many_summary["status"] == "finished"
    assert many_summary["eval_return_mean"] == pytest.approx(sum(scores) / 2)
    assert many_summary["eval_return_std"] == pytest.approx(abs(scores[0] - scores[1]) / 2)
    assert [each["seed"] for each in many_summary["runs"]] == [3, 5]
    printed = capsys.readouterr().out
    assert "seed=5 (2/2), in sequence in this process" in printed
    assert "seed=5 (2/2) step 300 100%" in printed
    assert "seeds: 2/2 done" in printed
    assert f"curves: tensorboard --logdir {tmp_path / 'many'}" in printed
    assert f"report: {tmp_path / 'many' / 'report.html'}" in printed
    page = (tmp_path / "many" / "report.html").read_text()
    assert "<p>2 runs</p>" in page and "<h2>Over seeds</h2>" in page


def test_seeds_without_tensorboard_and_reports_name_neither(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = (*SHORT, "total_steps=40", "log.tensorboard=false", "report.at_end=false")
    assert command(*typed, "seeds=[3,5]", f"run_dir={tmp_path}") == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    monkeypatch.setattr(sys, "argv", ["train.py"])  # as `command` does
    assert last == [f"runs:   {tmp_path}", f"curves: {command_of('plot')} {tmp_path}"]
    assert not (tmp_path / "report.html").exists()


def test_a_sweep_over_seed_trains_the_same_runs(
    single_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("-m", *SHORT, "seed=3,5", f"hydra.sweep.dir={tmp_path}") == 0
    jobs = json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert [each["label"] for each in jobs] == ["seed=3", "seed=5"]
    for each, seed in zip(jobs, (3, 5), strict=True):
        run, single = tmp_path / each["run_dir"], single_runs / str(seed)
        assert result(run) == result(single)
        assert metrics(run) == metrics(single)
        assert each["score"] == summary(single)["eval_return_mean"]
    printed = capsys.readouterr().out
    assert "sweep: 2/2 done" in printed and f"sweep:  {tmp_path / 'sweep.json'}" in printed
    assert f"curves: tensorboard --logdir {tmp_path}" in printed


def test_a_signal_ends_the_current_seed_and_all_resume(
    single_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = (*SHORT, "seeds=[3,5]", f"run_dir={tmp_path / 'many'}")
    updates = summary(single_runs / "3")["updates"]
    step, calls = steadyrl.agents.learner.learner.Learner.step, 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == updates + 7:  # in the second run
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    monkeypatch.setattr(steadyrl.agents.learner.learner.Learner, "step", counted)
    assert command(*typed) == 143
    many_summary = summary(tmp_path / "many")
    assert many_summary["status"] == "interrupted"
    assert [each["status"] for each in many_summary["runs"]] == ["finished", "interrupted"]
    assert command(*typed) == 2, "an unfinished run is resumed only with resume=auto"
    first = (tmp_path / "many" / "seed-3" / "summary.json").stat().st_mtime_ns
    assert command(*typed, "resume=auto") == 0
    assert (tmp_path / "many" / "seed-3" / "summary.json").stat().st_mtime_ns == first
    assert_equal_to_single_runs(tmp_path / "many", single_runs)
    assert summary(tmp_path / "many")["status"] == "finished"


def test_a_diverged_seed_does_not_stop_the_others(
    single_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverging(job: Any) -> float | None:
        if job.settings.run.seed != 4:
            return train.train(job)
        with open_run(job):
            raise NonFiniteError("train/loss is not finite at update 1")

    many = tmp_path / "many"
    typed = (*SHORT, "seeds=[3,4,5]", f"run_dir={many}")
    assert command(*typed, run=diverging) == 5
    assert_equal_to_single_runs(many, single_runs)
    many_summary = summary(many)
    assert many_summary["status"] == summary(many / "seed-4")["status"] == "diverged"
    assert "1 of 3 jobs did not finish; the first, seed=4: train/loss" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [("finished", "finished", "diverged"), ("killed",) * 3])
def test_the_means_of_seeds_are_of_the_same_runs(ends: tuple[str, ...], tmp_path: Path) -> None:
    records = []
    for seed, status in enumerate(ends):
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        (folder / "config.yaml").write_text(f"seed: {seed}")
        found = {"status": status, "return_mean": 10.0 * seed, "eval_return_mean": None}
        if status != "diverged":
            found["eval_return_mean"] = 100.0 * seed
        (folder / "summary.json").write_text(json.dumps(found))
        records.append(SweepJob(folder.name, f"seed={seed}", [], "", str(folder), status=status))
    write_summary(tmp_path, records)
    many = summary(tmp_path)
    runs = range(2 if "finished" in ends else 3)
    assert many["return_mean"] == pytest.approx(sum(10 * seed for seed in runs) / len(runs))
    assert many["eval_return_mean"] == pytest.approx(sum(100 * seed for seed in runs) / len(runs))


def test_seeds_that_ended_at_a_memory_limit_go_on_with_a_higher_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ending(job: Any) -> float | None:
        error = MemoryBudgetError("memory.limit_mb=9000 is reached")
        error.overrides = ("memory.limit_mb=11250",)
        with open_run(job):
            raise error

    many = tmp_path / "many"
    typed = (*SHORT, "memory.limit_mb=9000", "seeds=[3,4]", f"run_dir={many}")
    assert command(*typed, run=ending) == 7
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("resume:"))
    assert line.endswith(f" memory.limit_mb=11250 run_dir={many} resume=auto")
    assert "memory.limit_mb=9000" not in line


def test_seeds_can_be_added_and_runs_extended(
    single_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = tmp_path / "many"
    shutil.copytree(single_runs / "3", many / "seed-3")
    assert command(*SHORT, "seeds=[3,5]", f"run_dir={many}", "resume=auto") == 0
    assert_equal_to_single_runs(many, single_runs)
    assert command(*SHORT, "seeds=[3]", f"resume={many}", "total_steps=400") == 0
    many_summary = summary(many / "seed-3")
    assert (many_summary["steps"], many_summary["resumed_from_step"]) == (400, 300)
    capsys.readouterr()
    assert command(*SHORT, "seeds=[3]", f"resume={many}", "total_steps=350") == 2
    shorter = "error: total_steps=350: is the whole length, and 400 steps are done; "
    assert capsys.readouterr().err == shorter + "total_steps=750 trains 350 more\n"
    assert command(*SHORT, "seeds=[8]", f"resume={many}") == 3
    other = (*SHORT, "agent.gamma=0.9", "total_steps=400", "seeds=[3,8]")
    assert command(*other, f"resume={many}") == 2, "the finished seed 3 had another gamma"
    assert "agent.gamma=0.9: cannot change" in capsys.readouterr().err
    assert not (many / "seed-8").exists()


@pytest.mark.parametrize("edited", ["agent: {", "seed: 4\nagent: {gamma: 0.5}\n"])
def test_edits_of_a_finished_seeds_config_have_no_effect(
    single_runs: Path, tmp_path: Path, edited: str
) -> None:
    shutil.copytree(single_runs / "3", tmp_path / "many" / "seed-3")
    (tmp_path / "many" / "seed-3" / "config.yaml").write_text(edited)
    again = (*SHORT, "seeds=[3]", f"run_dir={tmp_path / 'many'}", "resume=auto")
    assert command(*again, "agent.gamma=0.99") == 0


def test_seeds_reject_torchrun_and_directories_of_single_runs(
    single_runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(*SHORT, "seeds=[1,2]", f"run_dir={single_runs / '3'}", "resume=auto") == 2
    assert "contains a run" in capsys.readouterr().err
    for name in NEEDED:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command(*SHORT, "seeds=[1,2]", f"run_dir={tmp_path / 'many'}") == 2
    assert "cannot be combined with torchrun" in capsys.readouterr().err
    with pytest.raises(SettingError, match="are many runs, and this is one"):
        job(tmp_path, "seeds=[1,2]")
    assert not (tmp_path / "many").exists()
