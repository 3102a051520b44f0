"""Copying to a store that works, fails, hangs or holds another run; stores are made of folders."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steadyrl.core.errors import SettingError
from steadyrl.training.checkpoints.archive import Existing
from steadyrl.training.checkpoints.manifest import self_hash
from steadyrl.training.checkpoints.store import Checkpoints
from steadyrl.training.mirror import mirror as module
from steadyrl.training.mirror.mirror import Mirror
from steadyrl.training.mirror.remote import RemoteFolder, mirror_url
from steadyrl.training.tuning.search_space import StudyError, job_of

pytest.importorskip("fsspec")

CONFIG = {"seed": 1, "env": {"id": "A"}, "total_steps": 5, "checkpoint": {"mirror": "x"}}


class Gate:
    """What is called waits here until the gate is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        self.reached.set()
        assert self.opened.wait(60)


class Folder(RemoteFolder):
    """A folder whose writes are counted, and can fail or wait."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"file://{path}", "checkpoint.mirror")
        self.path, self.written, self.failures = path, list[str](), 0
        self.before: Callable[[str], object] = bool

    def write(self, name: str, source: bytes | Path) -> None:
        try:
            self.before(name)
        except Exception:
            self.failures += 1
            raise
        super().write(name, source)
        self.written.append(name)

    @property
    def checkpoints(self) -> list[str]:
        found = self.path.glob("checkpoints/step-*/manifest.json")
        return sorted(path.parent.name[-2:] for path in found)

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.path.glob("files/*")}

    def named(self) -> set[str]:
        """Return the hashes that the manifests name."""
        manifests = [json.loads(path.read_text()) for path in self.path.rglob("manifest.json")]
        return {entry["sha256"] for each in manifests for entry in each["files"].values()}


class Setting:
    """A run directory, its checkpoints and its mirror."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.run, self.folder = path / "run", Folder(path / "store")
        self.checkpoints = Checkpoints(self.run / "checkpoints", keep=2)
        self.config = CONFIG
        self.mirror = self.mirrored(**options)

    def mirrored(self, config: Any = CONFIG, *, new: bool = True, **options: Any) -> Mirror:
        mirror = Mirror(self.folder, self.run, config, keep=2, new=new, **options)
        mirror.begin()
        self.run.mkdir(exist_ok=True)
        mirror.attach(self.checkpoints)
        return mirror

    def save(self, step: int, score: float | None = None) -> None:
        """Save a part of its own and one that is linked to the checkpoint before."""
        before = self.checkpoints.last
        block: Any = {"x": torch.arange(9)} if before is None else Existing(before, "block")
        parts = [("own", {"step": step}), ("block", block)]
        metadata = {"config": self.config, "eval_return_mean": score}
        self.checkpoints.save(step, parts, metadata)
        self.checkpoints.wait()

    def copy_two_and_go_back(self) -> None:
        """Copy the checkpoints of steps 0 and 1, and end; the run goes on from the first."""
        for step in (0, 1):
            self.save(step)
            assert self.mirror.finish()
        self.mirror.close()
        self.checkpoints.last = self.checkpoints.directory / "step-000000000000"


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.mirror.close()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "steadyrl")
    return lambda: [record.getMessage() for record in caplog.records]


def test_each_file_is_copied_once_and_the_manifest_last(setting: Setting) -> None:
    for step in (0, 1):
        setting.save(step)
        assert setting.mirror.finish()
    *data, manifest = [name for name in setting.folder.written if "metrics" not in name]
    assert manifest == "checkpoints/step-000000000001/manifest.json"
    assert len(set(data)) == len(data)
    assert len([name for name in data if name.startswith("files/")]) == 4  # own twice, block once
    assert setting.folder.files == setting.folder.named()
    assert not list(setting.folder.path.rglob("*.part"))


def test_old_checkpoints_are_removed_as_locally_with_their_files(setting: Setting) -> None:
    for step in range(5):
        setting.save(step, score=9.0 if step == 1 else 0.0)
        assert setting.mirror.finish()
    local = sorted(path.name[-2:] for path in setting.checkpoints.directory.glob("step-*"))
    assert setting.folder.checkpoints == local == ["01", "03", "04"]
    assert setting.folder.files == setting.folder.named()


def test_leftovers_of_an_interrupted_copy_are_removed(setting: Setting) -> None:
    setting.mirror.close()
    orphans = [setting.folder.path / "files" / name for name in ("a" * 64, "b" * 64 + ".part")]
    orphans[0].parent.mkdir(parents=True)
    for orphan in orphans:
        orphan.write_bytes(b"half")
    mirror = setting.mirrored()
    setting.save(0)
    assert mirror.finish()
    assert not any(orphan.exists() for orphan in orphans)
    mirror.close()


def test_while_a_copy_runs_only_the_newest_checkpoint_waits(setting: Setting) -> None:
    setting.folder.before = gate = Gate()
    setting.save(0)
    assert gate.reached.wait(60)
    for step in (1, 2, 3, 4):
        setting.save(step)
    kept = sorted(path.name[-2:] for path in setting.checkpoints.directory.glob("step-*"))
    assert kept == ["00", "03", "04"], "a checkpoint that is being copied was removed"
    gate.opened.set()
    assert setting.mirror.finish()
    copied = [name[-16:-14] for name in setting.folder.written if name.endswith("/manifest.json")]
    assert copied == ["00", "04"]


def test_a_store_that_fails_is_warned_of_each_time_that_doubles(
    setting: Setting, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.0)
    ninth = threading.Event()

    def refuse(name: str) -> None:
        if setting.folder.failures == 9:
            ninth.set()
            return
        raise PermissionError("no")

    setting.folder.before = refuse
    setting.save(0)
    assert ninth.wait(60)
    assert setting.mirror.finish(), "it goes on once the store does"
    url = setting.folder.url
    assert warnings() == [
        f"cannot copy to {url} (PermissionError: no). Training continues",
        *(
            f"cannot copy to {url} (PermissionError: no, {n} failures so far). Training continues"
            for n in (2, 4, 8)
        ),
    ]


def test_metrics_that_are_too_long_are_left_out_and_checkpoints_are_not(
    setting: Setting, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_TEXT", 8)
    (setting.run / "metrics.jsonl").write_text("x" * 9)
    for step in range(2):
        setting.save(step)
        assert setting.mirror.finish()
    assert setting.folder.checkpoints == ["00", "01"]
    assert not (setting.folder.path / "metrics.jsonl").exists()
    (warning,) = warnings()
    assert "9 bytes, at most 8 are allowed" in warning and "the rest of the run" in warning


def test_a_store_that_hangs_is_warned_of_and_not_waited_for(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    now = [0.0]
    setting = Setting(tmp_path, clock=lambda: now[0])
    setting.folder.before = gate = Gate()
    setting.save(0)
    assert gate.reached.wait(60)
    for step, seconds in enumerate((100.0, 130.0, 200.0, 270.0, 300.0), start=1):
        now[0] = seconds
        setting.save(step)
    silent = "no file was finished for"
    assert [line for line in warnings() if silent in line] == [
        f"cannot copy to {setting.folder.url} ({silent} {n} s). Training continues"
        for n in (130, 270)
    ]
    assert setting.mirror.finish(0.0) is False
    assert "is not complete after 0 s at the end of the run" in warnings()[-1]
    gate.opened.set()
    setting.mirror.close()


def test_a_new_run_does_not_touch_a_folder_that_holds_one(setting: Setting) -> None:
    setting.save(0)
    assert setting.mirror.finish()
    before = setting.folder.files
    with pytest.raises(SettingError, match=r"checkpoint\.mirror=file://.*: holds a run already"):
        setting.mirrored()
    with pytest.raises(SettingError, match="holds another run; choose another URL"):
        setting.mirrored({**CONFIG, "seed": 2}, new=False)
    setting.mirrored({**CONFIG, "total_steps": 9}, new=False).close()
    assert setting.folder.files == before


def test_a_run_that_went_back_leaves_later_copies(
    setting: Setting, warnings: Callable[[], list[str]]
) -> None:
    setting.copy_two_and_go_back()
    mirror = setting.mirrored(new=False, goes_back=True)
    assert mirror.finish()
    assert setting.folder.checkpoints == ["00"]
    assert warnings()[-1].endswith("step-000000000001, which the run left")
    mirror.close()


def test_an_old_copy_of_a_run_leaves_what_another_machine_did(
    setting: Setting, warnings: Callable[[], list[str]]
) -> None:
    setting.copy_two_and_go_back()  # as where the newest is damaged on this disk
    newest = setting.checkpoints.directory / "step-000000000001"
    before = setting.folder.files
    mirror = setting.mirrored(new=False)
    assert not mirror.finish()
    assert "holds this run up to step-000000000001, and here it is at step-0" in warnings()[-2]
    mirror.close()
    shutil.rmtree(newest)  # as on a machine that ran it before
    with pytest.raises(SettingError, match=r"holds this run up to .*; choose another URL, or cont"):
        setting.mirrored(new=False)
    assert setting.folder.checkpoints == ["00", "01"]
    assert setting.folder.files == before >= setting.folder.named()


def test_a_machine_that_comes_back_leaves_its_successor_alone(
    setting: Setting, warnings: Callable[[], list[str]]
) -> None:
    setting.save(0)
    assert setting.mirror.finish()
    mirror = setting.mirrored(new=False)  # also offers what is saved from now on
    setting.save(1)
    assert mirror.finish()
    before = setting.folder.files
    setting.mirror.offer(setting.checkpoints.directory / "step-000000000000")
    assert not setting.mirror.finish()
    assert "another process goes on with this run: nothing is copied" in warnings()[-2]
    assert setting.folder.files == before >= setting.folder.named()
    assert setting.folder.checkpoints == ["00", "01"]
    setting.save(2)
    assert mirror.finish()
    mirror.close()


def test_a_policy_whose_copy_was_interrupted_is_whole(setting: Setting) -> None:
    """Its file is there, and its manifest not: a leftover, until the manifest comes."""
    setting.mirror.close()
    setting.save(0)
    policy = setting.run / "policy"
    shutil.copytree(setting.checkpoints.directory / "step-000000000000", policy)
    manifest = json.loads((policy / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        entry["sha256"] = hashlib.sha256((policy / name).read_bytes() + b" ").hexdigest()
        (policy / name).write_bytes((policy / name).read_bytes() + b" ")
        entry["bytes"] += 1
        setting.folder.write(f"files/{entry['sha256']}", policy / name)
    manifest["sha256"] = self_hash(manifest)
    (policy / "manifest.json").write_text(json.dumps(manifest))
    mirror = setting.mirrored()
    assert mirror.finish()
    assert (setting.folder.path / "policy" / "manifest.json").is_file()
    assert setting.folder.files == setting.folder.named()
    mirror.close()


def test_a_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="a search is many runs, and a URL holds one"):
        job_of([f"checkpoint.mirror=file://{tmp_path}"], tmp_path / "run")


def test_one_of_several_runs_has_a_folder_of_its_own() -> None:
    assert mirror_url("s3://a/b/", Path("run")) == "s3://a/b"
    assert mirror_url("s3://a/b", Path("x/seed-3")) == "s3://a/b/seed-3"
    assert mirror_url("s3://a/b/seed-3", Path("x/seed-3")) == "s3://a/b/seed-3"
    assert mirror_url("s3://a/b", Path("x/job-1/seed-3")) == "s3://a/b/job-1/seed-3"
    assert mirror_url("s3://a/b/job-1/seed-3", Path("job-1/seed-3")) == "s3://a/b/job-1/seed-3"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nosuch://a", "nosuch:// is unknown"),
        ("s4://a", "did you mean s3"),
    ],
)
def test_an_unknown_store_is_refused(url: str, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        RemoteFolder(url, "checkpoint.mirror")


def test_the_extra_is_named_where_a_store_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    with pytest.raises(SettingError, match=r"needs the extra cloud: pip install .*\[cloud\]"):
        RemoteFolder("s3://bucket", "checkpoint.mirror")
