from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import FailingFiles, RecordedOs, after_power_cut, lay_out

import steadyrl.core.files
from steadyrl.core.errors import SettingError
from steadyrl.core.files import Files
from steadyrl.training.checkpoints import store
from steadyrl.training.checkpoints.archive import TEMPORARY, Existing, read_part
from steadyrl.training.checkpoints.manifest import CheckpointError, verified_metadata
from steadyrl.training.checkpoints.run_directory import RunDirectory
from steadyrl.training.checkpoints.store import Checkpoints
from steadyrl.training.config.schema import build
from steadyrl.training.config.settings import CheckpointSettings

ROOT = Path(__file__).resolve().parents[3]


def parts(number: int, size: int = 10) -> dict[str, Any]:
    return {"agent": {"weights": torch.full((size,), float(number))}, "run": {"steps": number}}


def save(checkpoints: Checkpoints, number: int, **metadata: Any) -> None:
    checkpoints.save(number, parts(number).items(), metadata)
    checkpoints.wait()


def accept_any(metadata: Mapping[str, Any]) -> None:
    assert "step" in metadata


def steps(checkpoints: Checkpoints) -> list[int]:
    return [saved.step for saved in checkpoints.candidates]


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_the_last_checkpoints_and_the_best_one_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    scores = {1: 5.0, 2: 9.0, 3: None, 4: 7.0, 5: 8.0, 6: None}
    for number, score in scores.items():
        save(checkpoints, number, eval_return_mean=score)
    assert steps(checkpoints) == [6, 5, 2]
    assert checkpoints.last == tmp_path / "checkpoints" / "step-000000000006"
    assert read_part(checkpoints.last, "run") == {"steps": 6}


def test_of_a_step_that_is_saved_again_the_newest_counts_and_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, eval_return_mean=5.0)
    for number in (2, 3, 3):
        save(checkpoints, number)
    assert names(tmp_path) == ["step-000000000001", "step-000000000002", "step-000000000003-2"]
    best = Checkpoints(tmp_path, keep=1)
    for score in (9.0, 7.0):
        save(best, 4, eval_return_mean=score)
    assert names(tmp_path) == ["step-000000000004", "step-000000000004-2"]


class CorruptingFiles(Files):
    """A disk that silently corrupts what it writes."""

    corrupting = False

    def write(self, path: Path, data: bytes | memoryview) -> None:
        wrong = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        super().write(path, wrong if self.corrupting and path.name.startswith("agent") else data)


def test_a_corrupted_save_removes_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = CorruptingFiles()
    checkpoints = Checkpoints(tmp_path, keep=1, files=files)
    save(checkpoints, 1)
    files.corrupting = True
    save(checkpoints, 2)
    assert "cannot write the checkpoint of step 2" in caplog.text
    assert checkpoints.last == tmp_path / "step-000000000001"
    assert next(checkpoints.iter_valid(accept_any)).step == 1
    files.corrupting = False
    save(checkpoints, 3)
    assert steps(checkpoints) == [3]


def test_the_newest_valid_checkpoint_is_used_and_damage_reported(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    for number in (1, 2, 3, 4):
        save(checkpoints, number)
    names = [saved.path for saved in checkpoints.candidates]
    (names[0] / "agent.json").unlink()
    content = bytearray((names[1] / "agent.safetensors").read_bytes())
    content[-1] ^= 1
    (names[1] / "agent.safetensors").write_bytes(content)
    assert next(checkpoints.iter_valid(accept_any)).step == 2
    missing, damaged = checkpoints.skipped.values()
    assert "agent.json: cannot be read" in missing
    assert "agent.safetensors: is damaged" in damaged


def test_all_checkpoints_are_kept_without_a_number(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=None)
    for number in range(1, 8):
        save(checkpoints, number)
    assert [saved.step for saved in checkpoints.candidates] == [7, 6, 5, 4, 3, 2, 1]


def test_the_setting_of_how_many_are_kept() -> None:
    values = {"every": 0, "seconds": 0.0, "replay": True, "mirror": None}
    assert build(CheckpointSettings, {**values, "keep": "all"}).most is None
    assert build(CheckpointSettings, {**values, "keep": 3}).most == 3
    for keep in (0, -1, "none"):
        with pytest.raises(SettingError, match="must be all"):
            build(CheckpointSettings, {**values, "keep": keep})


@pytest.mark.parametrize("damaged", [1, 2])
@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path, keep: int, damaged: int) -> None:
    earlier = Checkpoints(tmp_path, keep=9)
    for number in (500, 1000, 1500):
        save(earlier, number)
    for saved in earlier.candidates[:damaged]:
        (saved.path / "run.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path, keep=keep)
    found = next(checkpoints.iter_valid(accept_any))
    checkpoints.last = found.path
    for number in (found.step + 10, found.step + 20, found.step + 30):
        save(checkpoints, number)
        assert checkpoints.last is not None and checkpoints.last.is_dir()
    again = Checkpoints(tmp_path, keep=keep)
    assert next(again.iter_valid(accept_any)).step == found.step + 30
    valid = [saved for saved in again.candidates if saved.path not in again.skipped]
    assert len(valid) == keep


def test_a_step_with_a_damaged_checkpoint_is_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    save(checkpoints, 10)
    (tmp_path / "step-000000000010" / "run.json").write_text("{}")
    save(checkpoints, 10)
    saved = next(checkpoints.iter_valid(accept_any))
    assert saved.path.name == "step-000000000010-2"


def test_a_step_that_is_saved_again_is_the_newest_though_older_saves_of_it_are_gone(
    tmp_path: Path,
) -> None:
    earlier = Checkpoints(tmp_path, keep=1)
    save(earlier, 10)
    save(earlier, 10)
    assert names(tmp_path) == ["step-000000000010-2"]
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(10, parts(10).items(), {}, prunes=False)
    checkpoints.wait()
    assert names(tmp_path) == ["step-000000000010-2", "step-000000000010-3"]
    assert checkpoints.last == checkpoints.candidates[0].path
    save(checkpoints, 10)
    assert names(tmp_path) == ["step-000000000010-4"]


def test_missing_and_damaged_checkpoints_raise_with_a_reason(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        next(checkpoints.iter_valid(accept_any))
    save(checkpoints, 1)
    (tmp_path / "step-000000000001" / "manifest.json").write_text("")
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        next(checkpoints.iter_valid(accept_any))


def test_checkpoints_rejected_by_the_caller_are_skipped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    save(checkpoints, 1, env="Acrobot-v1")

    def require_cartpole(metadata: Mapping[str, Any]) -> None:
        if metadata["env"] != "CartPole-v1":
            raise CheckpointError(f"is of {metadata['env']}")

    with pytest.raises(CheckpointError, match="is of Acrobot-v1"):
        next(checkpoints.iter_valid(require_cartpole))


def test_saves_are_written_one_after_the_other(tmp_path: Path) -> None:
    released = threading.Event()
    order = []

    class BlockingFiles(Files):
        def write(self, path: Path, data: bytes | memoryview) -> None:
            released.wait()
            order.append("first")
            super().write(path, data)

    def second() -> Iterator[tuple[str, Any]]:
        order.append("second")
        yield "run", {"steps": 2}

    checkpoints = Checkpoints(tmp_path, keep=2, files=BlockingFiles())
    checkpoints.save(1, {"run": {"steps": 1}}.items(), {})
    threading.Timer(0.1, released.set).start()
    checkpoints.save(2, second(), {})
    checkpoints.wait()
    assert order[:3] == ["first", "first", "second"]
    assert steps(checkpoints) == [2, 1]


def test_without_another_thread_the_save_is_written_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    checkpoints, ended = Checkpoints(tmp_path, keep=2), list[int]()
    checkpoints.save(1, parts(1).items(), {}, lambda: ended.append(1))
    assert steps(checkpoints) == [1] and ended == [1] and not checkpoints.busy


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / f"{TEMPORARY}step-000000000007"
    leftover.mkdir()
    (leftover / "agent.safetensors").write_bytes(b"half of i")
    save(Checkpoints(tmp_path, keep=2), 9)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000009"]


def test_unrelated_files_are_not_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    (directory / "step-000000000001").symlink_to(outside)
    (directory / "notes.txt").write_text("mine")
    (directory / "step-1").mkdir()
    checkpoints = Checkpoints(directory, keep=1)
    for number in (2, 3):
        save(checkpoints, number)
    assert steps(checkpoints) == [3]
    assert (outside / "precious").read_text() == (directory / "notes.txt").read_text() == "mine"
    assert (directory / "step-1").is_dir()


def test_the_first_checkpoint_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordedOs()
    monkeypatch.setattr(steadyrl.core.files, "os", recorded)
    with RunDirectory(tmp_path / "disk" / "outputs" / "run", {"config.yaml": ""}) as directory:
        save(Checkpoints(directory.path / "checkpoints", keep=2), 1)
    lay_out(after_power_cut(recorded.log, names_survive=False), tmp_path, tmp_path / "after")
    leftover = tmp_path / "after" / "disk" / "outputs" / "run" / "checkpoints"
    assert next(Checkpoints(leftover, keep=2).iter_valid(accept_any)).step == 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_disk_errors_cause_one_warning_and_lose_no_checkpoint(
    tmp_path: Path, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("steadyrl").propagate = True
    save(Checkpoints(tmp_path / "c", keep=2), 1)
    for at in range(1, 30):
        files = FailingFiles(at, error)
        checkpoints = Checkpoints(tmp_path / "c", keep=2, files=files)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "steadyrl"):
            save(checkpoints, at + 1)
        if files.count < at:
            break
        assert {record.levelname for record in caplog.records} == {"WARNING"}
        assert len({record.getMessage() for record in caplog.records}) == 1
        assert os.strerror(error) in caplog.text
        saved = next(Checkpoints(tmp_path / "c", keep=2).iter_valid(accept_any))
        assert read_part(saved.path, "run")["steps"] == saved.step >= at
        files.at = 0
        save(checkpoints, at + 1)  # the next save succeeds
        assert next(checkpoints.iter_valid(accept_any)).step == at + 1
    assert at > 8
    assert not list((tmp_path / "c").glob(".writing*"))


def test_a_directory_that_cannot_be_listed_is_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system whose server was lost."""
    logging.getLogger("steadyrl").propagate = True
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    save(checkpoints, 1)

    def lost(path: Path) -> list[Any]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "steadyrl"):
        patch.setattr(store, "saved_below", lost)
        save(checkpoints, 2)
    assert checkpoints.failure == os.strerror(errno.ESTALE)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("cannot write the checkpoint of step 2 (")
    save(checkpoints, 3)
    assert checkpoints.failure is None
    assert next(checkpoints.iter_valid(accept_any)).step == 3


class KeepingFiles(Files):
    """A disk on which checkpoints cannot be removed: they are another user's, say."""

    def remove(self, path: Path) -> None:
        if path.name.startswith("step-"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        super().remove(path)


def test_old_checkpoints_that_cannot_be_removed_are_no_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("steadyrl").propagate = True
    checkpoints = Checkpoints(tmp_path / "c", keep=1, files=KeepingFiles())
    with caplog.at_level(logging.WARNING, "steadyrl"):
        for number in range(1, 5):
            save(checkpoints, number)
    assert checkpoints.failure is None
    assert checkpoints.last == tmp_path / "c" / "step-000000000004"
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("cannot remove old checkpoints ([Errno 13] Permission denied: ")


def test_a_full_disk_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("steadyrl").propagate = True
    full = FailingFiles(1, errno.ENOSPC)
    checkpoints = Checkpoints(tmp_path, keep=2, files=full)
    for number in (1, 2, 3):
        full.count = 0
        save(checkpoints, number)
    assert len({record.getMessage() for record in caplog.records}) == 1


@pytest.mark.parametrize("earlier", [False, True])
def test_the_warning_says_whether_an_older_checkpoint_exists(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, earlier: bool
) -> None:
    logging.getLogger("steadyrl").propagate = True
    files = FailingFiles(0, errno.ENOSPC)
    checkpoints = Checkpoints(tmp_path, keep=2, files=files)
    if earlier:
        save(checkpoints, 0)
    files.count, files.at = 0, 1
    save(checkpoints, 1)
    (message,) = (record.getMessage() for record in caplog.records)
    end = "the previous one is kept" if earlier else "there is none to resume from yet"
    assert message.endswith(end)


def test_a_really_full_disk_keeps_the_old_checkpoint(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk / "c", keep=3)
    save(checkpoints, 1)
    checkpoints.save(2, parts(2, size=1_000_000).items(), {})
    checkpoints.wait()
    assert next(checkpoints.iter_valid(accept_any)).step == 1
    assert os.listdir(small_disk / "c") == ["step-000000000001"]  # space was freed
    save(checkpoints, 3)
    assert next(checkpoints.iter_valid(accept_any)).step == 3


def test_linked_parts_survive_the_removal_of_old_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    block = torch.arange(100_000, dtype=torch.float32)
    checkpoints.save(1, [("rows-0", {"rows": block})], {})
    checkpoints.wait()
    for number in range(2, 6):
        assert checkpoints.last is not None
        checkpoints.save(number, [("rows-0", Existing(checkpoints.last, "rows-0"))], {})
        checkpoints.wait()
    assert steps(checkpoints) == [5]
    assert torch.equal(read_part(checkpoints.candidates[0].path, "rows-0")["rows"], block)


WRITER = """
import sys
from pathlib import Path
import torch
from steadyrl.training.checkpoints.store import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
checkpoints.open()
step = max([saved.step for saved in checkpoints.candidates], default=0)
while True:
    step += 1
    tensor = torch.full((200_000,), float(step))
    checkpoints.save(step, [("agent", {"weights": tensor}), ("run", {"steps": step})], {})
    checkpoints.wait()
    print(step, flush=True)
"""


def killed_while_writing(directory: Path, kills: int, generator: random.Random) -> int:
    """Kill a process that saves all the time; return how many kills met a save in progress."""
    inside = reported = 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for _ in range(generator.randrange(1, 4)):
            reported = int(process.stdout.readline())
        # Somewhere within the next save.
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        reported = max([reported, *map(int, rest)])
        inside += bool(list(directory.glob(".writing*")))
        saved = next(Checkpoints(directory, keep=2).iter_valid(accept_any))
        assert saved.step >= reported, "a checkpoint that was reported is lost"
        assert float(read_part(saved.path, "agent")["weights"][0]) == saved.step
        assert verified_metadata(saved.path)["step"] == saved.step
    return inside


@pytest.mark.long
def test_kills_while_writing_lose_nothing(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, 3, random.Random(0))
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.open()
    assert not list(tmp_path.glob(".writing*"))
