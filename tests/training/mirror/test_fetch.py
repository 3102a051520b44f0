"""`resume=URL`: an exact continuation, and a stranger's store that is checked before it is read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opened import job
from unhurried import unhurried_saves

from steadyrl.core.errors import SettingError
from steadyrl.loop import train
from steadyrl.training.checkpoints.manifest import CheckpointError, self_hash
from steadyrl.training.checkpoints.run_directory import read_summary, resume_command
from steadyrl.training.config.overrides import as_override
from steadyrl.training.mirror import mirror as module
from steadyrl.training.mirror.fetch import fetch
from tests.test_resume import metrics

pytest.importorskip("fsspec")

SAVING = ("total_steps=500", "checkpoint.every=100", "checkpoint.keep=9", "eval.every=0")
SAME = ("weights_sha256", "steps", "updates", "episodes", "return_mean", "status")
NEWEST, BEFORE = "step-000000000300", "step-000000000200"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run and its copy, of which the last two checkpoints were lost."""
    folder = tmp_path_factory.mktemp("whole")
    with unhurried_saves(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(module.Mirror, "offer", copied_at_once(module.Mirror.offer))
        train(job(folder, *SAVING, f"checkpoint.mirror=file://{folder}/store"))
    for name in ("step-000000000400", "step-000000000500"):
        shutil.rmtree(folder / "store" / "checkpoints" / name)
    return folder


def copied_at_once(offer: Any) -> Any:
    """Have each checkpoint copied before the next one is saved."""

    def offer_and_wait(self: module.Mirror, checkpoint: Path) -> None:
        offer(self, checkpoint)
        assert self.finish()

    return offer_and_wait


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole / "store", tmp_path / "store")
    return tmp_path / "store"


def manifest_of(store: Path, name: str = NEWEST) -> tuple[Path, dict[str, Any]]:
    path = store / "checkpoints" / name / "manifest.json"
    return path, json.loads(path.read_text())


def change(store: Path, **entry: Any) -> None:
    """Change an entry of the newest manifest, as an author with bad intent would."""
    path, manifest = manifest_of(store)
    manifest["files"]["agent.json"] |= entry
    manifest["sha256"] = self_hash(manifest)
    path.write_text(json.dumps(manifest))


def test_a_run_goes_on_exactly_from_its_copy(whole: Path, store: Path, tmp_path: Path) -> None:
    assert read_summary(whole / "run")["mirror_complete"] is True
    assert read_summary(whole / "store")["mirror_complete"] is True
    shutil.rmtree(whole / "store")
    shutil.copytree(store, whole / "store")
    train(job(tmp_path, f"resume=file://{whole}/store", quick=False))
    ended = read_summary(tmp_path / "run")
    assert ended["resumed_from_step"] == 300
    assert ended["mirror_complete"] is True
    first = read_summary(whole / "run")
    assert {key: ended[key] for key in SAME} == {key: first[key] for key in SAME}
    assert metrics(tmp_path / "run") == metrics(whole / "run")
    assert not (tmp_path / "run" / ".fetching").exists()
    newest = whole / "store" / "checkpoints" / "step-000000000500" / "manifest.json"
    assert newest.exists(), "it is copied to where it came from"
    shutil.rmtree(whole / "store")
    shutil.copytree(store, whole / "store")


def test_auto_starts_a_run_and_continues_its_copy(store: Path, tmp_path: Path) -> None:
    again = (*SAVING, "resume=auto", f"checkpoint.mirror=file://{store}")
    assert job(tmp_path, *again).settings.run.resume == f"file://{store}"
    elsewhere = (*SAVING, "resume=auto", f"checkpoint.mirror=file://{tmp_path}/nothing")
    assert job(tmp_path, *elsewhere).continues is None


def test_a_directory_with_a_run_is_not_fetched_into(whole: Path, tmp_path: Path) -> None:
    kept = tmp_path / "run" / "checkpoints" / BEFORE
    kept.mkdir(parents=True)
    with pytest.raises(SettingError, match=r"holds checkpoints already; .* continue: resume="):
        fetch(f"file://{whole}/store", tmp_path / "run")
    assert kept.is_dir()


def test_a_runs_own_directory_is_no_copy(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match=f"{whole}/run: is a run's own directory, not a copy"):
        fetch(f"file://{whole}/run", tmp_path / "run")


def fetched(store: Path, run: Path) -> list[str]:
    run.mkdir()
    fetch(f"file://{store}", run)
    return os.listdir(run / "checkpoints")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"sha256": "../../../../etc/passwd"}, "has hashes that are none"),
        ({"sha256": "A" * 64}, "has hashes that are none"),
        ({"bytes": 1 << 60}, "are free on the disk"),
        ({"bytes": 1}, "does not have 1 bytes"),
        ({"sha256": "0" * 64}, "lacks"),
    ],
)
def test_a_manifest_that_asks_for_more_than_a_run_has(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    entry: dict[str, Any], reason: str,
) -> None:  # fmt: skip
    change(store, **entry)
    assert fetched(store, tmp_path / "run") == [BEFORE]
    [warning] = [record.getMessage() for record in caplog.records]
    assert reason in warning
    assert warning.startswith(f"file://{store}/checkpoints/{NEWEST}")
    assert warning.endswith("using the checkpoint before it")


def test_a_disk_too_small_for_the_newest_is_no_reason_to_go_back(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=1)
    monkeypatch.setattr("steadyrl.training.mirror.fetch.shutil.disk_usage", lambda path: free)
    with pytest.raises(CheckpointError, match=f"{NEWEST}: holds .* are free on the disk"):
        fetched(store, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_damaged_and_linked_files_are_refused(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, manifest = manifest_of(store)
    files = [store / "files" / entry["sha256"] for entry in manifest["files"].values()]
    kept = {name.name: name.read_bytes() for name in files}
    before = str(manifest_of(store, BEFORE)[1])
    own = next(path for path in files if path.name not in before)

    def refused(reason: str, run: str) -> None:
        caplog.clear()
        assert fetched(store, tmp_path / run) == [BEFORE]
        assert reason in caplog.text
        own.unlink()

    own.write_bytes(bytes(len(kept[own.name])))
    refused("is damaged: its hash is another", "a")
    (tmp_path / "outside").write_bytes(kept[own.name])
    own.symlink_to(tmp_path / "outside")
    refused("is not a plain file", "b")
    os.mkfifo(own)
    refused("is not a plain file", "c")
    own.write_bytes(kept[own.name])
    path.write_text("{")
    refused("manifest.json: is damaged", "d")


def test_a_manifest_that_is_too_long_is_not_read(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manifest_of(store)[0].open("ab") as file:
        file.truncate(17_000_000)
    assert fetched(store, tmp_path / "run") == [BEFORE]
    assert "is larger than 16,000,000 bytes" in caplog.text


def test_nothing_is_left_where_nothing_can_be_fetched(store: Path, tmp_path: Path) -> None:
    shutil.rmtree(store / "files")
    typed = f"resume=file://{store}"
    with pytest.raises(CheckpointError, match="lacks"):
        train(job(tmp_path, typed, quick=False))
    assert not (tmp_path / "run").exists()
    shutil.rmtree(store / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint to continue from"):
        job(tmp_path, typed, quick=False)


def test_a_checkpoint_cannot_ask_for_copies_to_a_url(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "run", tmp_path / "run")
    typed = f"resume={tmp_path}/run"
    with pytest.raises(CheckpointError, match="name it in the command") as refused:
        job(tmp_path, typed, quick=False)
    url = f"checkpoint.mirror=file://{whole}/store"
    named = as_override("checkpoint.mirror", f"file://{whole}/store")
    run = tmp_path / "run"
    assert refused.value.details == (resume_command(run, f"run_dir={run}", named),)
    for mirror in (url, "checkpoint.mirror=null"):
        assert job(tmp_path, typed, mirror, quick=False).continues is not None


def test_modules_are_named_again_beside_the_whole_url(store: Path, tmp_path: Path) -> None:
    path, manifest = manifest_of(store)
    manifest["metadata"]["config"]["callbacks"] = ["own_callbacks:Watch"]
    manifest["sha256"] = self_hash(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="imports a module") as refused:
        job(tmp_path, f"resume=file://{store}", quick=False)
    assert f" resume=file://{store} " in refused.value.details[0]


@pytest.mark.parametrize("key", ["resume", "checkpoint.mirror"])
def test_a_url_with_a_password_or_a_query_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(SettingError, match="holds a password") as refused:
        job(tmp_path, f"{key}='s3://me:hunter2@bucket/a'")
    assert "hunter2" not in str(refused.value)
    with pytest.raises(SettingError, match="has a query") as refused:
        job(tmp_path, f"{key}='https://host/a?signature=hunter2'")
    assert "hunter2" not in str(refused.value)
    with pytest.raises(SettingError, match="must be the URL of a folder"):
        job(tmp_path, "checkpoint.mirror=folder")


def test_a_store_that_refuses_changes_nothing_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.0)
    monkeypatch.setattr("steadyrl.training.run.finalize.END_SECONDS", 0.0)
    (tmp_path / "file").write_text("not a folder")
    mirror = f"checkpoint.mirror=file://{tmp_path}/file/a"
    ended = train(job(tmp_path, "total_steps=200", "eval.every=0", mirror))
    log = (tmp_path / "run" / "train.log").read_text()
    assert ended.exit_code == 0
    assert read_summary(tmp_path / "run")["mirror_complete"] is False
    assert f"cannot copy to file://{tmp_path}/file/a (NotADirectoryError" in log


def test_a_process_killed_while_it_waits_for_the_store_has_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, another rank or torchrun itself may end it then."""
    seen, finish = [], module.Mirror.finish

    def look(self: module.Mirror, seconds: float) -> bool:
        found = read_summary(tmp_path / "run")
        seen.append((found["status"], found["mirror_complete"]))
        return finish(self, seconds)

    monkeypatch.setattr(module.Mirror, "finish", look)
    mirror = f"checkpoint.mirror=file://{tmp_path}/store"
    train(job(tmp_path, "total_steps=200", "eval.every=0", mirror))
    assert seen[0] == ("finished", False)
    assert read_summary(tmp_path / "run")["mirror_complete"] is True
