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
from steadyrl.core.files import Files
from steadyrl.training.checkpoints.archive import TEMPORARY, Existing, read_part
from steadyrl.training.checkpoints.manifest import CheckpointError, verified_metadata
from steadyrl.training.checkpoints.run_directory import RunDirectory
from steadyrl.training.checkpoints.store import Checkpoints

ROOT = Path(__file__).resolve().parents[3]


def parts(number: int, size: int = 10) -> dict[str, Any]:
    return {"agent": {"weights": torch.full((size,), float(number))}, "run": {"steps": number}}


def save(checkpoints: Checkpoints, number: int, **metadata: Any) -> None:
    checkpoints.save(number, parts(number).items(), metadata)
    checkpoints.wait()


def anything(metadata: Mapping[str, Any]) -> None:
    assert "step" in metadata


def steps(checkpoints: Checkpoints) -> list[int]:
    return [saved.step for saved in checkpoints.all()]


def test_the_last_few_and_the_best_one_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    scores = {1: 5.0, 2: 9.0, 3: None, 4: 7.0, 5: 8.0, 6: None}
    for number, score in scores.items():
        save(checkpoints, number, eval_return_mean=score)
    assert steps(checkpoints) == [6, 5, 2]
    assert checkpoints.last == tmp_path / "checkpoints" / "step-000000000006"
    assert read_part(checkpoints.last, "run") == {"steps": 6}


class LyingFiles(Files):
    """A disk that keeps something else than it was given, and says nothing."""

    lies = False

    def write(self, path: Path, data: bytes | memoryview) -> None:
        wrong = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        super().write(path, wrong if self.lies and path.name.startswith("agent") else data)


def test_nothing_is_removed_for_one_that_is_not_what_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = LyingFiles()
    checkpoints = Checkpoints(tmp_path, keep=1, files=files)
    save(checkpoints, 1)
    files.lies = True
    save(checkpoints, 2)
    assert "cannot write the checkpoint of step 2" in caplog.text
    assert checkpoints.last == tmp_path / "step-000000000001"
    assert next(checkpoints.iter_valid(anything)).step == 1
    files.lies = False
    save(checkpoints, 3)
    assert steps(checkpoints) == [3]


def test_the_newest_whole_one_is_used_and_what_is_wrong_with_others_is_known(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    for number in (1, 2, 3, 4):
        save(checkpoints, number)
    names = [saved.path for saved in checkpoints.all()]
    (names[0] / "agent.json").unlink()
    content = bytearray((names[1] / "agent.safetensors").read_bytes())
    content[-1] ^= 1
    (names[1] / "agent.safetensors").write_bytes(content)
    assert next(checkpoints.iter_valid(anything)).step == 2
    missing, damaged = checkpoints.skipped.values()
    assert "agent.json: cannot be read" in missing
    assert "agent.safetensors: is damaged" in damaged


@pytest.mark.parametrize("damaged", [1, 2])
@pytest.mark.parametrize("keep", [1, 2])
def test_what_is_damaged_does_not_count_as_kept(tmp_path: Path, keep: int, damaged: int) -> None:
    earlier = Checkpoints(tmp_path, keep=9)
    for number in (500, 1000, 1500):
        save(earlier, number)
    for saved in earlier.all()[:damaged]:
        (saved.path / "run.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path, keep=keep)
    found = next(checkpoints.iter_valid(anything))
    checkpoints.last = found.path
    for number in (found.step + 10, found.step + 20, found.step + 30):
        save(checkpoints, number)
        assert checkpoints.last is not None and checkpoints.last.is_dir()
    again = Checkpoints(tmp_path, keep=keep)
    assert next(again.iter_valid(anything)).step == found.step + 30
    whole = [saved for saved in again.all() if saved.path not in again.skipped]
    assert len(whole) == keep


def test_a_step_that_has_a_damaged_checkpoint_gets_a_second_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    save(checkpoints, 10)
    (tmp_path / "step-000000000010" / "run.json").write_text("{}")
    save(checkpoints, 10)
    saved = next(checkpoints.iter_valid(anything))
    assert saved.path.name == "step-000000000010-2"


def test_none_at_all_and_none_that_is_whole_are_errors_that_say_why(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        next(checkpoints.iter_valid(anything))
    save(checkpoints, 1)
    (tmp_path / "step-000000000001" / "manifest.json").write_text("")
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        next(checkpoints.iter_valid(anything))


def test_what_the_caller_refuses_is_passed_over_with_its_reason(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    save(checkpoints, 1, env="Acrobot-v1")

    def refuse(metadata: Mapping[str, Any]) -> None:
        if metadata["env"] != "CartPole-v1":
            raise CheckpointError(f"is of {metadata['env']}")

    with pytest.raises(CheckpointError, match="is of Acrobot-v1"):
        next(checkpoints.iter_valid(refuse))


def test_one_is_written_after_the_other(tmp_path: Path) -> None:
    held = threading.Event()
    order = []

    class HeldFiles(Files):
        def write(self, path: Path, data: bytes | memoryview) -> None:
            held.wait()
            order.append("first")
            super().write(path, data)

    def second() -> Iterator[tuple[str, Any]]:
        order.append("second")
        yield "run", {"steps": 2}

    checkpoints = Checkpoints(tmp_path, keep=2, files=HeldFiles())
    checkpoints.save(1, {"run": {"steps": 1}}.items(), {})
    threading.Timer(0.1, held.set).start()
    checkpoints.save(2, second(), {})
    checkpoints.wait()
    assert order[:3] == ["first", "first", "second"]
    assert steps(checkpoints) == [2, 1]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / f"{TEMPORARY}step-000000000007"
    left.mkdir()
    (left / "agent.safetensors").write_bytes(b"half of i")
    save(Checkpoints(tmp_path, keep=2), 9)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000009"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
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


def test_a_power_cut_leaves_the_first_checkpoint_and_all_directories_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordedOs()
    monkeypatch.setattr(steadyrl.core.files, "os", recorded)
    with RunDirectory(tmp_path / "disk" / "outputs" / "run", {"config.yaml": ""}) as directory:
        save(Checkpoints(directory.path / "checkpoints", keep=2), 1)
    lay_out(after_power_cut(recorded.log, names_survive=False), tmp_path, tmp_path / "after")
    left = tmp_path / "after" / "disk" / "outputs" / "run" / "checkpoints"
    assert next(Checkpoints(left, keep=2).iter_valid(anything)).step == 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_costs_one_warning_and_no_checkpoint(
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
        saved = next(Checkpoints(tmp_path / "c", keep=2).iter_valid(anything))
        assert read_part(saved.path, "run")["steps"] == saved.step >= at
        files.at = 0
        save(checkpoints, at + 1)  # whatever failed, the next one succeeds
        assert next(checkpoints.iter_valid(anything)).step == at + 1
    assert at > 8
    assert not list((tmp_path / "c").glob(".writing*"))


def test_a_disk_that_stays_full_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("steadyrl").propagate = True
    full = FailingFiles(1, errno.ENOSPC)
    checkpoints = Checkpoints(tmp_path, keep=2, files=full)
    for number in (1, 2, 3):
        full.count = 0
        save(checkpoints, number)
    assert len({record.getMessage() for record in caplog.records}) == 1


@pytest.mark.parametrize("earlier", [False, True])
def test_a_first_checkpoint_that_fails_keeps_no_other(
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


def test_a_really_full_disk_leaves_the_old_checkpoint_whole(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk / "c", keep=3)
    save(checkpoints, 1)
    checkpoints.save(2, parts(2, size=1_000_000).items(), {})
    checkpoints.wait()
    assert next(checkpoints.iter_valid(anything)).step == 1
    assert os.listdir(small_disk / "c") == ["step-000000000001"]  # there is room again
    save(checkpoints, 3)
    assert next(checkpoints.iter_valid(anything)).step == 3


def test_unchanged_parts_are_kept_once_however_old_checkpoints_are_pruned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    block = torch.arange(100_000, dtype=torch.float32)
    checkpoints.save(1, [("rows-0", {"rows": block})], {})
    checkpoints.wait()
    for number in range(2, 6):
        assert checkpoints.last is not None
        checkpoints.save(number, [("rows-0", Existing(checkpoints.last, "rows-0"))], {})
        checkpoints.wait()
    assert steps(checkpoints) == [5]
    assert torch.equal(read_part(checkpoints.all()[0].path, "rows-0")["rows"], block)


WRITER = """
import sys
from pathlib import Path
import torch
from steadyrl.training.checkpoints.store import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
checkpoints.open()
step = max([saved.step for saved in checkpoints.all()], default=0)
while True:
    step += 1
    tensor = torch.full((200_000,), float(step))
    checkpoints.save(step, [("agent", {"weights": tensor}), ("run", {"steps": step})], {})
    checkpoints.wait()
    print(step, flush=True)
"""


def killed_while_writing(directory: Path, kills: int, generator: random.Random) -> int:
    """Kill a process that saves all the time; return how many kills met a save half done."""
    inside = told = 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for _ in range(generator.randrange(1, 4)):
            told = int(process.stdout.readline())
        # Somewhere within the next save: its length is what the last ones took.
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        told = max([told, *map(int, rest)])
        inside += bool(list(directory.glob(".writing*")))
        saved = next(Checkpoints(directory, keep=2).iter_valid(anything))
        assert saved.step >= told, "a checkpoint that was reported is lost"
        assert float(read_part(saved.path, "agent")["weights"][0]) == saved.step
        assert verified_metadata(saved.path)["step"] == saved.step
    return inside


def test_kills_while_writing_lose_nothing(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, 3, random.Random(0))
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.open()
    assert not list(tmp_path.glob(".writing*"))
