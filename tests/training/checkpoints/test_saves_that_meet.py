"""A save during another one, and saves because of changed settings."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest
from forked_ranks import start, together
from opened import job
from replay_factory import make_replay
from synthetic_envs import EnvConfig, SyntheticEnvs

import steadyrl.training.checkpoints.replay_blocks
from steadyrl.agents.learner.comm import Comm
from steadyrl.core.files import Files
from steadyrl.loop import train
from steadyrl.training.checkpoints.manifest import manifest_of, saved_below, verified_metadata
from steadyrl.training.checkpoints.run_directory import read_summary
from steadyrl.training.checkpoints.saver import Saver
from steadyrl.training.config.settings import CheckpointSettings
from steadyrl.training.distributed.comm import Ranks
from steadyrl.training.distributed.saver import RankCheckpoints
from steadyrl.training.setup import open_run
from tests.training.checkpoints.test_replay_blocks import StubAgent, feed

KEEP_ONE = CheckpointSettings(every=1, seconds=0, keep=1, replay=True, mirror=None)


class Held(Files):
    """A disk that blocks at the second directory until `answers` is set."""

    def __init__(self) -> None:
        self.made, self.asked, self.answers = 0, threading.Event(), threading.Event()

    def make_directory(self, path: Path) -> None:
        self.made += path.name.startswith(".writing")
        if self.made == 2:
            self.asked.set()
            self.answers.wait()
        super().make_directory(path)


def test_overlapping_saves_are_both_written_with_keep_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steadyrl.training.checkpoints.replay_blocks, "BLOCK_BYTES", 300)
    scene, disk = EnvConfig(), Held()
    replay, _ = make_replay("host", scene, 200, 1, 0.9, False)
    envs = SyntheticEnvs(scene, 0)
    replay.start(envs.first())
    feed(replay, list(envs.timesteps(100)))
    saver = Saver(KEEP_ONE, tmp_path, {}, files=disk)
    agent = StubAgent(replay)
    saver.attach(agent, agent, agent)  # type: ignore[arg-type]
    saver.save(1, None)
    saver.checkpoints.wait()
    saver.save(2, None)  # removes the first one when complete
    disk.asked.wait()
    threading.Timer(0.05, disk.answers.set).start()
    saver.save(3, None)  # as after the best evaluation so far
    saver.checkpoints.wait()
    assert [saved.step for saved in saved_below(tmp_path / "checkpoints")] == [3]
    assert "cannot write" not in caplog.text


def newest_known(comm: Comm, folder: str) -> tuple[str | None, bool]:
    """Save three times with keep=1; return the checkpoint this rank would link blocks from."""
    assert isinstance(comm, Ranks)
    checkpoints = RankCheckpoints(Path(folder), comm, keep=1, files=Files())
    prefix = f"rank{comm.rank:04d}-" if comm.rank else ""
    for step in (1, 2, 3):
        checkpoints.sync()
        checkpoints.save(step, [(f"{prefix}run", {"steps": step})], {})
    checkpoints.sync()
    last = checkpoints.last
    return (last and last.name), bool(last and last.is_dir())


def test_every_rank_links_from_the_kept_checkpoint(tmp_path: Path) -> None:
    assert together(2, newest_known, str(tmp_path)) == [("step-000000000003", True)] * 2


SAVED = ("resume=auto", "checkpoint.seconds=1000", "eval.every=0", "total_steps=400")


def test_changed_settings_are_saved_before_the_first_step(tmp_path: Path) -> None:
    train(job(tmp_path, *SAVED))
    longer = (*SAVED, "total_steps=900")
    with suppress(SystemExit), open_run(job(tmp_path, *longer)) as (run, *_):
        assert run.steps == 400
        run._services.saver.checkpoints.wait()
        raise SystemExit  # killed before the first step
    found = job(tmp_path, f"resume={tmp_path / 'run'}", quick=False)
    assert found.settings.run.total_steps == 900
    assert found.continues == ()
    # A second checkpoint of the same step removes no other one.
    assert [saved.step for saved in saved_below(tmp_path / "run" / "checkpoints")] == [400, 400, 0]
    train(job(tmp_path, "resume=auto", quick=False))
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("finished", 900)


@pytest.mark.long
def test_changed_settings_of_ranks_are_saved_at_once(tmp_path: Path) -> None:
    for total in ("400", "600"):
        ranks = start(tmp_path, 2, "run_dir=run", *SAVED, f"total_steps={total}")
        outputs = [rank.communicate() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
    saved = saved_below(tmp_path / "run" / "checkpoints")
    assert saved[0].step >= 600 and saved[1].path.name.endswith("-2")
    found = [manifest_of(each.path) for each in saved]
    assert [each["metadata"]["config"]["total_steps"] for each in found] == [600, 600]
    assert found[0]["files"].keys() == found[1]["files"].keys()
    assert verified_metadata(saved[1].path)["ranks"] == 2


def test_unchanged_settings_are_not_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []
    monkeypatch.setattr(Saver, "save", lambda self, step, score: saved.append(step))
    saver = Saver(KEEP_ONE, tmp_path, {})
    saver.save_changes((), 7)
    saver.save_changes(("run_dir=/a (not /b: a continued run stays where it is)",), 7)
    assert saved == []
    saver.save_changes(("total_steps=9 (was 8)",), 7)
    assert saved == [7]
    never = CheckpointSettings(every=0, seconds=0, keep=1, replay=True, mirror=None)
    Saver(never, tmp_path, {}).save_changes(("total_steps=9 (was 8)",), 7)
    assert saved == [7]
