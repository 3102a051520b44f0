"""Malicious files in a run's directory: huge, deeply nested, pipes, sockets, links."""

import json
import logging
import os
import socket
import tracemalloc
from pathlib import Path

import pytest
from safetensors.torch import save
from torch import ones
from written_runs import write_run

from steadyrl.core.errors import SettingError
from steadyrl.core.files import Files, open_regular, read_lines, read_regular
from steadyrl.core.safe_parsing import from_json, read_yaml
from steadyrl.training.analysis.past_runs import NoRunError, read_run
from steadyrl.training.checkpoints.archive import read_part, write_archive
from steadyrl.training.checkpoints.manifest import CheckpointError, manifest_of, self_hash
from steadyrl.training.checkpoints.plain import from_document
from steadyrl.training.checkpoints.run_directory import (
    RunDirectory,
    absolute,
    read_summary,
    validate_no_links,
)
from steadyrl.training.cli.checkpoint import main as checkpoint
from steadyrl.training.cli.compare import main as compare
from steadyrl.training.cli.failures import has_traceback
from steadyrl.training.logging.logger import Logger, to_file
from steadyrl.training.sweeps.jobs import SweepDirectory
from steadyrl.training.tuning.search_space import StudyError, read_study

TAG = "eval/return_mean"
BOMB = "a0: &a0 [0, 0]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
DEEP_YAML = "a: " + "[" * 3000 + "]" * 3000 + "\n"


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def socket_(path):
    path.unlink(missing_ok=True)
    here = os.getcwd()
    os.chdir(path.parent)  # paths of sockets must be short
    try:
        with socket.socket(socket.AF_UNIX) as socket_file:
            socket_file.bind(path.name)
    finally:
        os.chdir(here)


def link(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


SPECIAL_FILES = pytest.mark.parametrize("make_special", [pipe, socket_, link])


@SPECIAL_FILES
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_links_and_special_files_are_not_opened(tmp_path, make_special, flags):
    path = tmp_path / "odd"
    make_special(path)
    with pytest.raises(OSError, match=r"is a link|is not a plain file"):
        open_regular(path, flags)


def test_files_above_the_size_limit_are_rejected(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, at most 4"):
        read_regular(tmp_path / "file", 4)


def test_long_lines_are_cut_and_offsets_stay_right(tmp_path):
    (tmp_path / "log").write_bytes(b"one\n" + b"x" * 20 + b"\ntwo\nthr")
    assert list(read_lines(tmp_path / "log", 8)) == [
        (b"one\n", 4), (b"x" * 8 + b"\n", 25), (b"two\n", 29), (b"thr", 32),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [b"[" * 10**6, b"[" + b"[]," * 10**6 + b"[]]", b'{"a":' * 50 + b"1" + b"}" * 50, b"\xff",
     b"[" * 900 + b"]" * 900, ("[" * 9).encode("utf-16")],
    ids=["open", "wide", "objects", "bytes", "below Python's own limit", "UTF-16"],
)  # fmt: skip
def test_large_and_deep_json_is_rejected(text):
    tracemalloc.start()
    try:
        for read in (from_json, lambda text: from_document(text, {})):
            with pytest.raises(ValueError):
                read(text)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", [BOMB, DEEP_YAML, "a: &a [*a]\n", "x: [" + "0, " * 10**5 + "0]"])
def test_yaml_bombs_are_rejected(tmp_path, text):
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(ValueError):
        read_yaml(tmp_path / "study.yaml")
    with pytest.raises(StudyError, match="cannot be read"):
        read_study(tmp_path / "study.yaml", {"a": ...}, {})


def test_small_yaml_aliases_are_accepted(tmp_path):
    (tmp_path / "study.yaml").write_text("a: &a [1, 2]\nb: *a\n")
    assert read_yaml(tmp_path / "study.yaml") == {"a": [1, 2], "b": [1, 2]}
    (tmp_path / "link.yaml").symlink_to("study.yaml")
    needed, kinds = {"a": ..., "b": ...}, {"a": list, "b": list}
    assert read_study(tmp_path / "link.yaml", needed, kinds)["b"] == [1, 2]


@pytest.mark.parametrize("text", [BOMB, DEEP_YAML], ids=["bomb", "deep"])
def test_compare_rejects_a_yaml_bomb_in_one_line(tmp_path, capsys, text):
    write_run(tmp_path / "run", {1: 1.0})
    (tmp_path / "run" / "config.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        compare([str(tmp_path / "run")])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


@SPECIAL_FILES
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_past_run_with_a_special_file_is_rejected(tmp_path, make_special, name):
    run = write_run(tmp_path / "run", {1: 1.0})
    make_special(run / name)
    with pytest.raises(NoRunError, match=f"{name}: cannot be read"):
        read_run(run, [TAG])


@SPECIAL_FILES
def test_a_special_file_in_place_of_a_summary_is_ignored(tmp_path, make_special):
    make_special(tmp_path / "summary.json")
    assert read_summary(tmp_path) == {}


@pytest.mark.parametrize("text", ["[" * 10**5, "[" * 900 + "]" * 900, "[1]", ""])
def test_an_invalid_summary_is_ignored(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    assert read_summary(tmp_path) == {}


@SPECIAL_FILES
def test_special_files_in_place_of_logs_do_not_block(tmp_path, make_special, caplog):
    for name in ("metrics.jsonl", "train.log"):
        make_special(tmp_path / name)
    logger = Logger(tmp_path)
    logger.continue_after(0)
    logger.write(1, {"a": 1.0}, 1.0)
    logger.close()
    assert "cannot write metrics" in caplog.text
    with to_file(tmp_path / "train.log"):
        logging.getLogger("steadyrl").warning("a message")
    assert not has_traceback(tmp_path / "train.log", ValueError())


def test_metrics_with_a_deeply_nested_line_are_continued(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + "[" * 3_000_000 + '\n{"step": 3}\n')
    logger = Logger(tmp_path)
    logger.continue_after(3)
    logger.close()
    assert (tmp_path / "metrics.jsonl").read_text().endswith('{"step": 3}\n')


@pytest.fixture
def archive(tmp_path):
    """Return an archive, and a function that changes one of its files and updates the hash."""
    path = tmp_path / "policy"
    write_archive(Files(), path, [("policy", {"w": ones(2, 2)})], {"config": {}})

    def forge(name, size, content=None):
        manifest = json.loads((path / "manifest.json").read_text())
        if content is not None:
            (path / name).write_bytes(content)
        os.truncate(path / name, size)
        manifest["files"][name]["bytes"] = size
        manifest["sha256"] = self_hash(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))

    return path, forge


def test_tensors_above_the_expected_size_are_rejected_unread(archive):
    path, forge = archive
    for content in (b"", save({"w": ones(2, 2)}), tensors_of(5 << 30)):
        forge("policy.safetensors", 5 << 30, content)
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=r"header|holds|describes"):
            read_part(path, "policy", most=1000)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
        tracemalloc.stop()


def tensors_of(size):
    """Return the header of a safetensors file that declares `size` bytes."""
    for digits in range(1, 3):
        count = size - 8 - 80 * digits
        head = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (count, count)
        if len(head) <= 80 * digits:
            head = head.ljust(80 * digits)
            return len(head).to_bytes(8, "little") + head
    raise AssertionError


def test_tensors_above_the_available_memory_are_rejected_unread(archive, monkeypatch):
    path, forge = archive
    monkeypatch.setattr(
        "steadyrl.training.checkpoints.archive.available_bytes", lambda: 2_500_000_000
    )
    forge("policy.safetensors", 5 << 30, tensors_of(5 << 30))
    with pytest.raises(CheckpointError, match="of memory, and"):
        read_part(path, "policy")


def test_json_above_the_size_limit_is_rejected_unread(archive):
    path, forge = archive
    forge("policy.json", 5 << 30)
    with pytest.raises(CheckpointError, match="bytes of JSON"):
        read_part(path, "policy")


@pytest.mark.parametrize("size", [True, -1, 1.5, "8"])
def test_invalid_sizes_are_rejected(archive, size):
    path, _ = archive
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["policy.json"]["bytes"] = size
    manifest["sha256"] = self_hash(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="names files that no checkpoint has"):
        manifest_of(path)


@pytest.mark.parametrize("metadata", ["deep", "wide"])
def test_a_huge_manifest_counts_as_damaged(archive, metadata):
    path, _ = archive
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["metadata"]["config"] = {} if metadata == "deep" else [[]] * 600_000
    for _ in range(300 if metadata == "deep" else 0):
        manifest["metadata"]["config"] = {"a": manifest["metadata"]["config"]}
    manifest["sha256"] = self_hash(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="is damaged"):
        manifest_of(path)


NAMES = [".hydra", "checkpoints", "policy", "policy-best", "videos", "wandb", "seed-0", ".jobs",
         "config.yaml", "summary.json", "metrics.jsonl", "train.log", "train-rank1.log",
         "events.out.tfevents.1.host.2", ".lock", "sweep.json", "multirun.yaml"]  # fmt: skip


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_links_in_a_run_directory_are_rejected_and_not_followed(tmp_path, name, continued):
    (tmp_path / "X").mkdir()
    (tmp_path / "X" / "config.yaml").write_text("mine")
    target = tmp_path / "X" / "config.yaml" if "." in name[1:] else tmp_path / "X"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    with pytest.raises(SettingError, match=f"{name} in it is a link"):
        RunDirectory(tmp_path / "run", {".hydra/config.yaml": "ours"}, continued=continued)
    with pytest.raises(SettingError):
        SweepDirectory(tmp_path / "run")
    assert [path.name for path in (tmp_path / "X").iterdir()] == ["config.yaml"]
    assert (tmp_path / "X" / "config.yaml").read_text() == "mine"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]


@pytest.mark.parametrize("continued", [False, True])
def test_a_checkpoint_that_is_a_link_is_not_passed_over(tmp_path, continued):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    name = "step-000000000300"
    (tmp_path / "run" / "checkpoints" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match=f"checkpoints/{name} in it is a link"):
        RunDirectory(tmp_path / "run", {".hydra/config.yaml": "ours"}, continued=continued)


def test_a_run_is_not_written_to_the_root_directory():
    for path in ("/", "/tmp/.."):
        with pytest.raises(SettingError, match=r"run_dir=/: is the root directory"):
            absolute(Path(path))


def test_linked_run_directories_and_unrelated_links_are_accepted(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "notes").symlink_to("/etc/hosts")
    (tmp_path / "run").symlink_to("disk")
    validate_no_links(tmp_path / "run")
    RunDirectory(tmp_path / "run", {"config.yaml": "seed: 0\n"}).close()


def test_a_pipe_or_directory_in_place_of_a_file_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "train.log")
    with pytest.raises(SettingError, match=r"train\.log in it is no plain file"):
        validate_no_links(tmp_path)
    (tmp_path / "train.log").unlink()
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(SettingError, match=r"config\.yaml in it is no plain file"):
        validate_no_links(tmp_path)


ESCAPE = "\x1b[2J\x1b]0;owned\x07"


def test_escape_sequences_of_files_do_not_reach_the_terminal(tmp_path, capsys):
    run = write_run(tmp_path / f"a{ESCAPE}", {1: 1.0, 2: 2.0}, env="Foo", rate=1)
    (run / "config.yaml").write_text(
        json.dumps({"env": {"id": f"E{ESCAPE}"}, "agent": {"name": f"g{ESCAPE}"}})
    )
    for form in ([], ["--markdown"]):
        compare([str(run), *form])
    write_archive(
        Files(), run / "policy", [("policy", {})], {"step": ESCAPE, ESCAPE: ESCAPE, "config": {}}
    )
    for command in ("list", "show", "verify"):
        checkpoint([command, str(run)])
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err and "\x07" not in captured.out + captured.err
    assert "owned" in captured.out
