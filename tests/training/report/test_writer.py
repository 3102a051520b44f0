"""Reports that runs write themselves: every so many steps, at the end, and despite failures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from locked import is_locked
from opened import job
from warm import run as run_in_process

from steadyrl.core.errors import MemoryBudgetError, SettingError
from steadyrl.loop import train
from steadyrl.training.report import writer
from steadyrl.training.run.run import Run

SHORT = ("total_steps=600", "eval.every=0", "log.every=200", "agent.learning_starts=100")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the status and steps that each written report shows."""
    seen = []
    write = writer.write_atomic

    def recording(path: Path, text: str) -> None:
        found = re.search(r"pill \w+'>(\w+)</span><td>([\d,]+)<td>", text)
        assert found is not None
        seen.append(f"{found[1]} {found[2]}")
        write(path, text)

    monkeypatch.setattr(writer, "write_atomic", recording)
    return seen


def test_a_run_writes_its_report_at_its_end(tmp_path, written):
    train(job(tmp_path, *SHORT))
    assert written == ["finished 600"]
    text = (tmp_path / "run" / "report.html").read_text()
    assert "DQN on CartPole-v1" in text and "train/loss" in text and "exit code 0" in text
    last = (tmp_path / "run" / "train.log").read_text().splitlines()[-1]
    assert last.endswith(f"INFO report: {tmp_path / 'run' / 'report.html'}")


def test_reports_at_the_end_can_be_off(tmp_path, written):
    train(job(tmp_path, *SHORT, "report.at_end=false"))
    assert written == [] and not (tmp_path / "run" / "report.html").exists()


def test_reports_are_written_at_every_multiple_and_after_a_resume(tmp_path, written):
    every = ("report.every=250", "env.num_envs=3")
    train(job(tmp_path, *SHORT, *every))
    # A running run shows the newest logged step.
    assert written == ["running 202", "running 400", "finished 601"]
    train(job(tmp_path, f"resume={tmp_path / 'run'}", "total_steps=1100", quick=False))
    assert written[3:] == ["running 601", "running 1,000", "finished 1,100"]


def test_reports_do_not_change_a_run(tmp_path):
    hashes = {
        train(job(tmp_path / str(every), *SHORT, f"report.every={every}")).summary.weights_sha256
        for every in (0, 70)
    }
    assert len(hashes) == 1


def test_a_run_that_fails_reports_why(tmp_path, monkeypatch):
    def fail(self: Run, *_: Any) -> None:
        raise MemoryBudgetError("a budget of 3 MB is exceeded")

    monkeypatch.setattr(Run, "on_steps", fail)
    with pytest.raises(MemoryBudgetError):
        train(job(tmp_path, *SHORT))
    text = (tmp_path / "run" / "report.html").read_text()
    assert "failed" in text and "exit code 7 · a budget of 3 MB is exceeded" in text


def test_a_run_that_ends_at_once_writes_no_report(tmp_path, monkeypatch, written):
    def stop(self: Run, *_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "on_steps", stop)
    with pytest.raises(KeyboardInterrupt):
        train(job(tmp_path, *SHORT))
    assert written == []
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError(), MemoryError()]
)
def test_a_failing_report_is_one_warning(tmp_path, monkeypatch, error):
    def fail(*_: Any) -> str:
        raise error

    monkeypatch.setattr(writer, "page", fail)
    result = train(job(tmp_path, *SHORT, "report.every=100"))
    assert (result.exit_code, result.summary.status) == (0, "finished")
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("WARNING cannot write report.html (") == log.count("WARNING") == 1


def test_the_lock_is_held_while_the_report_is_written(tmp_path, monkeypatch):
    """Closing a file of its own process would release it."""
    held = []
    page = writer.page

    def building(*arguments: Any) -> str:
        held.append(is_locked(tmp_path / "run"))
        return page(*arguments)

    monkeypatch.setattr(writer, "page", building)
    train(job(tmp_path, *SHORT, "report.every=300"))
    assert held == [True, True]


def test_a_partly_written_report_is_removed_on_resume(tmp_path):
    train(job(tmp_path, *SHORT))
    partial = tmp_path / "run" / ".report.html-0123abcd"
    partial.write_text("<")
    train(job(tmp_path, f"resume={tmp_path / 'run'}", "total_steps=700", quick=False))
    assert not partial.exists()


def test_a_report_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").symlink_to(tmp_path / "other.html")
    with pytest.raises(SettingError, match=r"report\.html in it is a link"):
        train(job(tmp_path, *SHORT))
    assert not (tmp_path / "other.html").exists()


def test_invalid_intervals_are_refused(tmp_path):
    _, _, printed = run_in_process(tmp_path, "report.every=-1", code=2)
    assert "report.every=-1: must be 0 (never) or more" in printed


@pytest.mark.long
def test_the_report_of_a_resumed_run_has_the_command_that_began_it(tmp_path):
    presets = tmp_path / "presets"
    (presets / "env").mkdir(parents=True)
    (presets / "env" / "mine.yaml").write_text("id: CartPole-v1\n")
    run_in_process(tmp_path, f"--config-dir={presets}", "env=mine", "run_dir=here", *SHORT)
    run_in_process(tmp_path, "resume=here", "total_steps=700", quick=False)
    page = (tmp_path / "here" / "report.html").read_text()
    assert f" --config-dir={presets} agent=dqn " in page and " env=mine " in page
    assert "resume=here" not in page
