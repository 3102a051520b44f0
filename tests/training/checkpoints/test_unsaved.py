"""Runs whose results could not be saved end with code 9 and name what was lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from forked_ranks import start
from opened import job

from steadyrl.loop import train
from steadyrl.training.checkpoints import archive, saver
from steadyrl.training.checkpoints import summary as summary_file
from steadyrl.training.checkpoints.manifest import ShortOfMemoryError, manifest_of, saved_below
from steadyrl.training.checkpoints.store import Checkpoints
from steadyrl.training.checkpoints.unsaved import UnsavedError, disk_space, explain
from steadyrl.training.evaluation.evaluator import Evaluator
from steadyrl.training.logging.sinks import JsonLines
from steadyrl.training.run.run import Run
from steadyrl.training.sweeps.jobs import SweepDirectory, SweepJob
from steadyrl.training.sweeps.subprocess_run import status_of

SHORT = ("total_steps=400", "eval.every=200", "eval.episodes=2", "resume=auto")


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]):
    """Make a function fail as on a full disk when `when(*arguments)` is true."""
    original = getattr(owner, name)

    def act(*args: Any, **named: Any) -> Any:
        return full() if when(*args) else original(*args, **named)

    monkeypatch.setattr(owner, name, act)


LOST: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "the last checkpoint": (
        Checkpoints, "_write", lambda _, path, *more: path.name != "step-000000000000"
    ),
    "policy/": (saver, "replace_archive", lambda _, path, *more: path.name == "policy"),
    "policy-best/": (saver, "replace_archive", lambda _, path, *more: path.name == "policy-best"),
    "summary.json": (summary_file, "write_atomic", lambda path, text: True),
    "the last metrics": (JsonLines, "write", lambda _, record: record.step == 400),
}  # fmt: skip


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


def test_a_limit_of_file_sizes_is_named_as_what_to_raise(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, before[1]))
    try:
        with pytest.raises(UnsavedError) as refused:
            train(job(tmp_path, "total_steps=6000", "agent.train_every=512", "eval.every=0"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    line = str(refused.value)
    assert "the last checkpoint: File too large; its files may have at most 307 KB" in line
    assert line.endswith("raise ulimit -f and start it again in another directory")


def test_a_limit_of_open_files_is_named_as_what_to_raise(tmp_path: Path) -> None:
    line = explain(tmp_path, 500, {"policy/": os.strerror(errno.EMFILE)}, continues=True)
    assert "policy/: Too many open files; at most" in line and "raise ulimit -n and" in line


def test_space_is_no_remedy_for_a_broken_disk(tmp_path: Path) -> None:
    line = explain(tmp_path, 500, {"policy/": os.strerror(errno.EIO)}, continues=True)
    assert line.endswith(f"policy/: Input/output error; mend this and continue it with "
                         f"resume={tmp_path}")  # fmt: skip
    quota = explain(tmp_path, 500, {"policy/": os.strerror(errno.EDQUOT)}, continues=True)
    assert "free space" in quota


def test_a_best_policy_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scored(monkeypatch, 3.0, 9.0)
    monkeypatch.setattr(saver, "replace_archive", full)
    with pytest.raises(UnsavedError):
        train(job(tmp_path, *SHORT))
    line = "warning: policy-best/ cannot be written: No space left on device"
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.parametrize("lost", LOST)
def test_unsaved_results_are_named_and_resuming_finishes_the_run(tmp_path: Path, lost: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, *LOST[lost])
        with pytest.raises(UnsavedError) as refused:
            train(job(tmp_path, *SHORT))
    line = str(refused.value)
    assert refused.value.exit_code == 9
    assert f"step 400 was reached, but not written: {lost}: No space left on device" in line
    assert "are free on /" in line
    assert f"continue it with resume={tmp_path / 'run'}" in line
    if lost != "summary.json":
        assert summary(tmp_path)["status"] == "failed"
    train(job(tmp_path, *SHORT))
    assert summary(tmp_path)["status"] == "finished"
    assert manifest_of(tmp_path / "run" / "policy")["metadata"]["step"] == 400
    assert saved_below(tmp_path / "run" / "checkpoints")[0].step == 400
    best = manifest_of(tmp_path / "run" / "policy-best")["metadata"]["eval_return_mean"]
    assert best == summary(tmp_path)["best_eval_return_mean"]


def scored(patch: pytest.MonkeyPatch, *scores: float) -> None:
    """Let the next evaluations have these scores."""
    left, evaluate = iter(scores), Evaluator.run

    def run(*args: Any) -> Any:
        result = evaluate(*args)
        return result and result._replace(returns=(next(left),))

    patch.setattr(Evaluator, "run", run)


def best_of(folder: Path) -> tuple[float, float]:
    """Return the score of `policy-best/` and the best one of the summary."""
    policy = manifest_of(folder / "run" / "policy-best")["metadata"]["eval_return_mean"]
    return policy, summary(folder)["best_eval_return_mean"]


def test_a_best_policy_that_was_never_written_is_not_the_one_to_beat(tmp_path: Path) -> None:
    written: list[Path] = []

    def second(*args: Any) -> bool:
        written.extend(
            each for each in args if isinstance(each, Path) and each.name == "policy-best"
        )
        return len(written) > 1 and written[-1] in args

    with pytest.MonkeyPatch.context() as patch:
        scored(patch, 3.0, 9.0)
        failing(patch, saver, "replace_archive", second)
        with pytest.raises(UnsavedError):
            train(job(tmp_path, *SHORT))
    assert best_of(tmp_path) == (3.0, 9.0)
    with pytest.MonkeyPatch.context() as patch:
        scored(patch, 5.0, 4.0)
        train(job(tmp_path, *SHORT, "total_steps=800"))
    assert best_of(tmp_path) == (5.0, 5.0)


def test_policies_scored_by_other_episodes_are_not_compared(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        scored(patch, 3.0, 9.0)
        train(job(tmp_path, *SHORT))
    with pytest.MonkeyPatch.context() as patch:
        scored(patch, 4.0, 2.0)
        train(job(tmp_path, *SHORT, "total_steps=800", "eval.seed=7"))
    assert best_of(tmp_path) == (4.0, 4.0)


def test_all_unsaved_results_are_named_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoints, "_write", full)
    monkeypatch.setattr(saver, "replace_archive", full)
    monkeypatch.setattr(summary_file, "write_atomic", full)
    with pytest.raises(UnsavedError) as refused:
        train(job(tmp_path, *SHORT))
    named = "the last checkpoint, policy-best/, policy/ and summary.json: No space left on device"
    assert named in str(refused.value)
    assert str(refused.value).endswith("free space and start it again in another directory")


def test_failed_saves_are_retried_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best policy with its weights of then, and the checkpoint of the last step."""
    tries: list[str] = []

    def once(*args: Any) -> bool:
        path = next(each for each in args if isinstance(each, Path))
        tries.append(path.name)
        return path.name in ("policy-best", "step-000000000400") and tries.count(path.name) == 1

    monkeypatch.setattr(Checkpoints, "busy", property(Checkpoints.wait))
    failing(monkeypatch, saver, "replace_archive", once)
    failing(monkeypatch, Checkpoints, "_write", once)
    scored(monkeypatch, 9.0, 5.0)
    train(job(tmp_path, *SHORT, "checkpoint.every=400"))
    assert summary(tmp_path)["status"] == "finished"
    best = manifest_of(tmp_path / "run" / "policy-best")["metadata"]
    assert (best["step"], best["eval_return_mean"]) == (200, 9.0)
    assert saved_below(tmp_path / "run" / "checkpoints")[0].step == 400


@pytest.mark.parametrize(("lost", "code"), [("the last checkpoint", 9), ("policy/", 143)])
def test_an_interrupted_run_reports_unsaved_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, code: int
) -> None:
    original = Run.on_steps

    def on_steps(self: Any, *args: Any) -> None:
        original(self, *args)
        if self.steps == 100:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Run, "on_steps", on_steps)
    failing(monkeypatch, *LOST[lost])
    assert train(job(tmp_path, *SHORT, "env.backend=sync")).exit_code == code
    assert summary(tmp_path)["status"] == "interrupted"


def test_a_really_full_disk_ends_the_command_with_9(small_disk: Path) -> None:
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(b"\1" * (free - 24_576))
    process = warm.start(small_disk, "run_dir=run", "eval.every=0", "total_steps=300")
    out, err = process.communicate()
    assert process.returncode == 9, out + err
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "the last checkpoint" in line and "No space left on device" in line
    assert f"free on {small_disk}: free space" in line
    assert "Traceback" not in out + err and "finished" not in out


def test_disk_space_names_the_file_system(tmp_path: Path, small_disk: Path) -> None:
    assert disk_space(small_disk).endswith(f"are free on {small_disk}")
    assert disk_space(tmp_path / "gone").startswith(f"{tmp_path / 'gone'} cannot be looked at")


def test_all_ranks_end_with_9_and_one_error(small_disk: Path) -> None:
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(b"\1" * (free - 24_576))
    ranks = start(small_disk, 2, "run_dir=run", "eval.every=0", "total_steps=400")
    outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [9, 9], outputs
    errors = "".join(err for _, err in outputs)
    assert errors.count("error: ") == 1 and "the last checkpoint" in errors


def test_a_sweep_counts_an_unsaved_run_as_failed(tmp_path: Path) -> None:
    sweep, run = SweepDirectory(tmp_path), tmp_path / "job"
    run.mkdir()
    (run / "summary.json").write_text('{"status": "failed"}')
    sweep_job = SweepJob("job", "seed=0", [], "", str(run), status=status_of(9), exit_code=9)
    sweep.write(sweep_job)
    [found] = sweep.named(["job"])
    assert (found.status, found.exit_code) == ("failed", 9)
    assert not sweep.is_done(found)


def test_a_checkpoint_that_does_not_fit_into_memory_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it would lose steps: with more memory the newest goes on."""
    short = ("device=cpu", "agent.hidden=[8]", "agent.compile=false", "checkpoint.every=100")
    train(job(tmp_path, *short, "total_steps=200"))
    with monkeypatch.context() as patch:
        patch.setattr(saver, "read_part", lambda *_, **__: torch.empty(2**60, dtype=torch.uint8))
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            train(job(tmp_path, *short, "total_steps=300", "resume=auto"))
    with monkeypatch.context() as patch:  # and without trying to read it
        patch.setattr(archive, "WORTH_A_LOOK", 0)
        patch.setattr(archive, "available_bytes", lambda: 1)
        with pytest.raises(ShortOfMemoryError, match="of memory, and 1 B are free") as refused:
            train(job(tmp_path, *short, "total_steps=300", "resume=auto"))
        assert refused.value.exit_code == 7
    went_on = train(job(tmp_path, *short, "total_steps=300", "resume=auto"))
    assert went_on.summary.resumed_from_step == 200
