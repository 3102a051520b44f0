from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import random
import shutil
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import FailingFiles, RecordedOs, after_power_cut, lay_out
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import steadyrl.core.files
from steadyrl.core.files import Files
from steadyrl.training.checkpoints.archive import (
    TEMPORARY,
    Existing,
    read_part,
    remove_unfinished,
    replace_archive,
    write_archive,
)
from steadyrl.training.checkpoints.formats import FORMAT
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    entry_of,
    recover_path,
    self_hash,
    verified_metadata,
)

GENERATOR = np.random.default_rng(0)


def state(number: int) -> dict[str, Any]:
    return {
        "weights": torch.full((5, 3), float(number)),
        "flags": torch.tensor([True, False]),
        "image": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        "generator": GENERATOR.bit_generator.state,
        "torch": torch.Generator().manual_seed(number).get_state(),
        "steps": number,
        "best": None,
        "worst": float("-inf"),
        "names": ["a", "ü"],
        "nested": {"empty": {}, "list": [[1.5, torch.zeros(0)], []]},
    }


def test_parts_of_ever_new_sizes_leave_nothing_behind(tmp_path):
    parts = [(f"part-{size}", {"log": torch.zeros(size)}) for size in range(1, 51)]
    write_archive(Files(), tmp_path / "first", parts[:1], {})
    before = len(ctypes.Array.__subclasses__())
    write_archive(Files(), tmp_path / "all", parts, {})
    assert len(ctypes.Array.__subclasses__()) == before


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_part_is_the_file_that_safetensors_writes(tmp_path, dtype, shape):
    tensor = torch.ones(shape, dtype=getattr(torch, dtype))
    write_archive(Files(), tmp_path / "one", [("part", {"value": tensor})], {})
    assert (tmp_path / "one" / "part.safetensors").read_bytes() == save({"value": tensor})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def write(path: Path, number: int, files: Files | None = None) -> None:
    parts = {"agent": state(number), "run": {}}
    write_archive(files or Files(), path, parts.items(), {"step": number})


def test_a_written_state_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "a", 7)
    assert verified_metadata(tmp_path / "a") == {"step": 7}
    assert same(read_part(tmp_path / "a", "agent"), state(7))
    assert read_part(tmp_path / "a", "run") == {}


def test_existing_archives_are_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    with pytest.raises(FileExistsError):
        write(tmp_path / "a", 2)
    assert read_part(tmp_path / "a", "agent")["steps"] == 1


@pytest.mark.parametrize("value", [{1: 2}, {"$tensor": "x"}, {"a": object()}, {"a": {1, 2}}])
def test_unsupported_types_are_rejected(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"state|a"):
        write_archive(Files(), tmp_path / "a", [("agent", value)], {})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"log": [0.0] * 1_100_000}, "values, 1,000,000 are allowed"),
        ({"text": ":," * 600_000}, "values, 1,000,000 are allowed"),
        ({"deep": reduce(lambda inner, _: [inner], range(60), 0)}, "is nested too deeply"),
        ({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, "a.b: two tensors have this name"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(
    tmp_path: Path, value: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        write_archive(Files(), tmp_path / "a", [("run", value)], {})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_any_failing_file_operation_keeps_the_old_archive(tmp_path: Path, error: int) -> None:
    write(tmp_path / "old", 1)
    operations = 1
    while True:
        files = FailingFiles(operations, error)
        try:
            write(tmp_path / "new", 2, files)
        except OSError as raised:
            assert raised.errno == error
        else:
            break
        assert verified_metadata(tmp_path / "old") == {"step": 1}
        if (tmp_path / "new").exists():  # only the final fsync failed
            assert verified_metadata(tmp_path / "new") == {"step": 2}
            Files().remove(tmp_path / "new")
        operations += 1
    assert operations == files.count + 1 > 8
    assert read_part(tmp_path / "new", "agent")["steps"] == 2
    remove_unfinished(Files(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


@pytest.mark.parametrize("names_survive", [False, True])
def test_a_power_cut_leaves_the_old_or_the_new_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_survive: bool
) -> None:
    recorded = RecordedOs()
    monkeypatch.setattr(steadyrl.core.files, "os", recorded)
    source = tmp_path / "disk"
    source.mkdir()
    write(source / "one", 1)
    first = len(recorded.log)
    write(source / "two", 2)
    for length in range(first, len(recorded.log) + 1):
        disk = after_power_cut(recorded.log[:length], names_survive=names_survive)
        target = tmp_path / f"after-{length}"
        lay_out(disk, source, target)
        assert read_part(target / "one", "agent")["steps"] == 1
        if (target / "two").exists():
            # Under its final name it is complete, even if the file system lost other renames.
            assert verified_metadata(target / "two") == {"step": 2}
            assert read_part(target / "two", "agent")["steps"] == 2
        elif length == len(recorded.log):
            pytest.fail("a checkpoint reported as saved is lost")


def test_unchanged_parts_are_hard_links(tmp_path: Path) -> None:
    write(tmp_path / "one", 1)
    parts = [("agent", Existing(tmp_path / "one", "agent")), ("run", {"new": 2})]
    write_archive(Files(), tmp_path / "two", parts, {"step": 2})
    name = "agent.safetensors"
    assert (tmp_path / "one" / name).stat().st_ino == (tmp_path / "two" / name).stat().st_ino
    Files().remove(tmp_path / "one")
    assert verified_metadata(tmp_path / "two") == {"step": 2}
    assert same(read_part(tmp_path / "two", "agent"), state(1))


@pytest.mark.parametrize(
    ("error", "copied"), [(errno.EPERM, True), (errno.EMLINK, True), (errno.EIO, False)]
)
def test_parts_are_copied_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, copied: bool
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", link)
    write(tmp_path / "one", 1)
    parts = [("agent", Existing(tmp_path / "one", "agent"))]
    if copied:
        write_archive(Files(), tmp_path / "two", parts, {"step": 2})
        assert verified_metadata(tmp_path / "two") == {"step": 2}
        assert same(read_part(tmp_path / "two", "agent"), state(1))
    else:
        with pytest.raises(OSError, match=os.strerror(error)):
            write_archive(Files(), tmp_path / "two", parts, {"step": 2})


def test_replacing_keeps_one_complete_archive_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    operations = 1
    while True:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        write(path, 1)
        files = FailingFiles(operations, errno.EIO)
        try:
            replace_archive(files, path, {"agent": state(2)}.items(), {"step": 2})
        except OSError:
            found = recover_path(path)
            assert verified_metadata(found)["step"] in (1, 2)
        else:
            break
        replace_archive(Files(), path, {"agent": state(3)}.items(), {"step": 3})
        assert recover_path(path) == path
        assert verified_metadata(path) == {"step": 3}
        operations += 1
    assert operations > 10
    assert verified_metadata(path) == {"step": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["policy"]


class PartlyRemovingFiles(Files):
    """Fail in the middle of a removal, as by a disk error or a kill."""

    def remove(self, path: Path) -> None:
        for file in path.glob("*.safetensors"):
            file.unlink()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().remove(path)


def test_a_partly_removed_archive_is_never_the_current_one(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    write(path, 1)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        replace_archive(PartlyRemovingFiles(), path, {"agent": state(2)}.items(), {"step": 2})
    assert verified_metadata(recover_path(path)) == {"step": 2}
    replace_archive(Files(), path, {"agent": state(3)}.items(), {"step": 3})
    assert verified_metadata(path) == {"step": 3}
    assert [each.name for each in tmp_path.iterdir()] == ["policy"]


def test_leftovers_of_a_killed_writer_are_replaced(tmp_path: Path) -> None:
    leftover = tmp_path / f"{TEMPORARY}a"
    leftover.mkdir()
    (leftover / "agent.json").write_text("half of i")
    write(tmp_path / "a", 1)
    assert verified_metadata(tmp_path / "a") == {"step": 1}


def test_files_and_link_targets_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("theirs", "link", "dangling"):
        with pytest.raises(FileExistsError):
            Files().write(tmp_path / name, b"mine")
    assert (tmp_path / "theirs").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_files_of_another_size_are_rejected_unread(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    os.truncate(tmp_path / "a" / "agent.safetensors", 1 << 40)  # a sparse file
    with pytest.raises(CheckpointError, match="bytes instead of"):
        verified_metadata(tmp_path / "a")


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedOs()
    monkeypatch.setattr(steadyrl.core.files, "os", recorded)
    write(tmp_path / "one", 1)
    created = [Path(entry[1]).name for entry in recorded.log if entry[0] == "create"]
    assert created[-1] == "manifest.json"
    assert len(created) == 4


def damage(path: Path, generator: random.Random) -> str:
    content = bytearray(path.read_bytes())
    position = generator.randrange(len(content))
    if generator.random() < 0.3:
        path.write_bytes(content[:position])
        return f"{path.name} cut at {position}"
    bit = 1 << generator.randrange(8)
    content[position] ^= bit
    path.write_bytes(content)
    return f"{path.name}: bit {bit} of byte {position}"


def test_two_thousand_bit_flips_and_truncations_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, 1)
    files = sorted(path.iterdir())
    original = {file: file.read_bytes() for file in files}
    generator = random.Random(0)
    for _ in range(2000):
        file = generator.choice(files)
        change = damage(file, generator)
        with pytest.raises(CheckpointError):
            verified_metadata(path)
            pytest.fail(f"not found: {change}")
        file.write_bytes(original[file])
    assert verified_metadata(path) == {"step": 1}


def rewrite_manifest(path: Path, **changes: Any) -> None:
    """Change a manifest and update its hash, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    manifest["sha256"] = self_hash(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def replace_file(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    files = json.loads((path / "manifest.json").read_text())["files"]
    rewrite_manifest(path, files=files | {name: entry_of(content)})


def header(text: bytes, data: bytes = b"\0" * 8) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


TENSOR = b'{"weights":{"dtype":"F32","shape":%s,"data_offsets":%s}}'
HOSTILE_TENSORS = {
    "a pickle": pickle.dumps({"weights": 1}),
    "nothing": b"",
    "less than a header": b"\1\0\0",
    "a header without end": (2**63).to_bytes(8, "little") + b"{}",
    "a header as long as memory": (2**40).to_bytes(8, "little") + b"{}" + b"\0" * 64,
    "more elements than bytes": header(TENSOR % (b"[4294967296,4294967296]", b"[0,8]")),
    "offsets beyond the end": header(TENSOR % (b"[2]", b"[0,4000000000]")),
    "negative offsets": header(TENSOR % (b"[2]", b"[-8,0]")),
    "overlapping tensors": header(
        b'{"weights":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    ),
    "a dtype that is none": header(b'{"weights":{"dtype":"OBJ","shape":[2],"data_offsets":[0,8]}}'),
    "no JSON": header(b"\x80\x04K\x01."),
    "other tensors": header(b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "brackets": header(b"[" * 100_000),
}
HOSTILE_DOCUMENTS = {
    "a pickle under a document's name": pickle.dumps([1]),
    "nothing as a document": b"",
    "brackets without end": b"[" * 200_000,
    "a tensor that is not there": b'{"a": {"$tensor": "../../etc/passwd"}}',
    "a tensor by number": b'{"a": {"$tensor": 3}}',
    "a tensor and more": b'{"a": {"$tensor": "weights", "b": 1}}',
    "a number that is code": b'{"a": {"$number": "__import__(\'os\')"}}',
    "NaN": b'{"a": NaN}',
    "deep nesting": b'{"a":' * 60 + b"1" + b"}" * 60,
    "half a line": b'{"a": 1',
    "not text": b"\xff\xfe\x00",
}
HOSTILE_NAMES = [
    "../outside.json", "/etc/passwd", "a/b.json", "..", ".", "", "A.json", "a b.json", "a\0.json",
    "a.json\n", "-rf.json", ".hidden", "a" * 300, "ü.json", "a..json", "con:x.json", "~root.json",
]  # fmt: skip
HOSTILE_MANIFESTS: list[Any] = [
    [], 3, None, "text", {}, {"format": "1"}, {"format": 1}, {"format": -1, "files": {}},
    {"format": 1, "files": [], "metadata": {}},
    {"format": 1, "files": {"a.json": 3}, "metadata": {}},
    {"format": 1, "files": {"a.json": {"bytes": -1}}, "metadata": {}},
    {"format": 1, "files": {"a.json": {"bytes": "9" * 50, "sha256": "x"}}, "metadata": {}},
    {"format": 10**400, "files": {}, "metadata": {}},
]  # fmt: skip


class Audit:
    """Record imports, executions and writes of this process while `on`."""

    WATCHED = (
        "import",
        "exec",
        "compile",
        "subprocess",
        "os.system",
        "os.exec",
        "pickle",
        "socket",
    )

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        writes = (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if event.startswith(self.WATCHED) or writes:
            self.seen.append(f"{event} {args}"[:200])


@pytest.fixture(scope="module")
def audit() -> Audit:
    return Audit()


def rejection(path: Path, audit: Audit) -> str:
    before = {file: file.lstat().st_mtime_ns for file in path.rglob("*")}
    for part in ("agent", "run"):  # so that reading imports nothing more
        with pytest.raises(CheckpointError):
            read_part(path / "missing", part)
    audit.seen.clear()
    audit.on = True
    try:
        with pytest.raises(CheckpointError) as caught:
            verified_metadata(path)
            read_part(path, "agent")
    finally:
        audit.on = False
    assert audit.seen == []
    assert {file: file.lstat().st_mtime_ns for file in path.rglob("*")} == before
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 700
    return message


@pytest.mark.parametrize("name", HOSTILE_TENSORS)
def test_hostile_tensors_are_rejected_in_one_line(tmp_path: Path, name: str, audit: Audit) -> None:
    write(tmp_path / "a", 1)
    replace_file(tmp_path / "a", "agent.safetensors", HOSTILE_TENSORS[name])
    rejection(tmp_path / "a", audit)


@pytest.mark.parametrize("name", HOSTILE_DOCUMENTS)
def test_hostile_documents_are_rejected_in_one_line(
    tmp_path: Path, name: str, audit: Audit
) -> None:
    write(tmp_path / "a", 1)
    replace_file(tmp_path / "a", "agent.json", HOSTILE_DOCUMENTS[name])
    rejection(tmp_path / "a", audit)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_unsafe_file_names_are_rejected(tmp_path: Path, name: str, audit: Audit) -> None:
    write(tmp_path / "a", 1)
    files = json.loads((tmp_path / "a" / "manifest.json").read_text())["files"]
    rewrite_manifest(tmp_path / "a", files=files | {name: entry_of(b"x")})
    assert "names files" in rejection(tmp_path / "a", audit)


@pytest.mark.parametrize("manifest", HOSTILE_MANIFESTS, ids=str)
def test_invalid_manifests_are_rejected(tmp_path: Path, manifest: Any, audit: Audit) -> None:
    write(tmp_path / "a", 1)
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    rejection(tmp_path / "a", audit)


def test_a_newer_format_is_rejected_as_newer(tmp_path: Path, audit: Audit) -> None:
    write(tmp_path / "a", 1)
    rewrite_manifest(tmp_path / "a", format=FORMAT + 1)
    assert f"newer version (format {FORMAT + 1}," in rejection(tmp_path / "a", audit)


def test_links_pipes_and_directories_are_rejected(tmp_path: Path, audit: Audit) -> None:
    outside = tmp_path / "outside"
    for name in ("agent.json", "manifest.json"):
        for kind in ("link", "pipe", "directory", "missing"):
            path = tmp_path / f"{name}-{kind}"
            write(path, 1)
            outside.write_bytes((path / name).read_bytes())
            (path / name).unlink()
            if kind == "link":
                (path / name).symlink_to(outside)
            elif kind == "pipe":
                os.mkfifo(path / name)
            elif kind == "directory":
                (path / name).mkdir()
            rejection(path, audit)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_rejected_as_a_manifest(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a"
    write(path, 1)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        verified_metadata(path)
