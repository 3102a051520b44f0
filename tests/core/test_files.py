"""Files and policies reported as written survive a power cut, also when they replaced others."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from disks import RecordedOs, after_power_cut

import steadyrl.core.files
from steadyrl.core.files import Files, write_atomic
from steadyrl.training.checkpoints.archive import finish_replacing, replace_archive, write_archive
from steadyrl.training.checkpoints.manifest import MANIFEST, OLD


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedOs:
    recorded = RecordedOs()
    monkeypatch.setattr(steadyrl.core.files, "os", recorded)
    return recorded


def survives(recorded: RecordedOs, path: Path, content: bytes) -> bool:
    return after_power_cut(recorded.log, names_survive=False).get(str(path)) == content


def test_a_replaced_policy_survives_a_power_cut(tmp_path: Path, recorded: RecordedOs) -> None:
    path = tmp_path / "policy"
    for number in (1, 2):
        replace_archive(Files(), path, [("policy", {})], {"step": number})
        assert survives(recorded, path / MANIFEST, (path / MANIFEST).read_bytes())


def test_a_replacement_finished_later_survives_a_power_cut(
    tmp_path: Path, recorded: RecordedOs
) -> None:
    path = tmp_path / "policy"
    write_archive(Files(), path.with_name(OLD + path.name), [("policy", {})], {})
    finish_replacing(Files(), path)
    assert survives(recorded, path / MANIFEST, (path / MANIFEST).read_bytes())


def test_write_atomic_syncs_before_renaming(tmp_path: Path, recorded: RecordedOs) -> None:
    write_atomic(tmp_path / "a.json", "{}")
    (created, temporary), (forced, _), (renamed, *names) = recorded.log
    assert (created, forced, renamed) == ("create", "fsync", "rename")
    assert names == [temporary, str(tmp_path / "a.json")]


@pytest.mark.parametrize("refused", [False, True])
def test_macos_writes_through_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    calls: list[str] = []

    def full(handle: int, command: int) -> None:
        calls.append("through")
        if refused:
            raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda handle: calls.append("fsync"))
    Files().write(tmp_path / "a", b"1")
    write_atomic(tmp_path / "b", "2")
    assert calls == ["through", "fsync"] * 2 if refused else calls == ["through"] * 2
