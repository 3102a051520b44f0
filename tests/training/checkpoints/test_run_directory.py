import errno
import fcntl
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from locked import is_locked

import steadyrl
from steadyrl.core.errors import SettingError
from steadyrl.training.checkpoints import run_directory
from steadyrl.training.checkpoints.run_directory import (
    RunDirectory,
    RunDirectoryInUseError,
    copy_history,
    in_use,
    newest_runs,
    read_summary,
    resume_command,
)
from steadyrl.training.checkpoints.summary import Summary

HOLD = """
import sys, os
from pathlib import Path
from steadyrl.training.checkpoints.run_directory import RunDirectory
held = RunDirectory(Path(sys.argv[1]))
if os.fork() == 0:
    signal_pipe = sys.stdin.read()  # a worker that outlives its killed parent keeps the file open
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("value", "saved"),
    [(1.23456789e-7, 1.23457e-7), (-0.0123456789, -0.0123457), (412.123456789, 412.123457)],
)
def test_a_summary_keeps_six_digits_of_small_returns(tmp_path, value, saved):
    summary = Summary("finished", str(tmp_path), "dqn", "Tiny-v0", 0, eval_return_mean=value)
    assert summary.save(tmp_path) is None
    assert read_summary(tmp_path)["eval_return_mean"] == saved


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "my run", "a=b", "übung", "copy (1)", "a,b", "a[1]", "a{1}", "a&b", "a#b", "~b"),
        *("it's", 'a "b"'),
    ],
)
def test_the_command_that_continues_a_run_names_its_directory(name):
    run = Path("/runs") / name
    *_, typed = shlex.split(resume_command(run))
    [read] = OverridesParser.create().parse_overrides([typed])
    assert (read.key_or_group, read.value()) == ("resume", str(run))


def test_a_directory_in_use_is_rejected_until_its_process_ends(tmp_path, monkeypatch):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunDirectoryInUseError, match="another run"):
        RunDirectory(tmp_path / "run")
    assert in_use(tmp_path / "run")
    with monkeypatch.context() as patch:  # a colleague's, which this user may only read
        opened = os.open

        def only_read(path, flags, *mode):
            if flags & os.O_RDWR and Path(path).name == ".lock":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return opened(path, flags, *mode)

        patch.setattr(os, "open", only_read)
        assert in_use(tmp_path / "run")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", only_read)
        assert not in_use(tmp_path / "run")
    with RunDirectory(tmp_path / "run"):
        pass
    holder.stdin.close()


def test_a_run_that_looks_at_itself_stays_locked(tmp_path):
    """A callback may read its run; closing a file of the process would release the lock."""
    run = tmp_path / "run"
    with RunDirectory(run, {"config.yaml": ""}):
        assert steadyrl.read(run).is_running
        with pytest.raises(RunDirectoryInUseError, match="another run"):
            RunDirectory(run)
        assert is_locked(run)
    assert not steadyrl.read(run).is_running


def test_a_directory_with_a_run_is_not_overwritten(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(SettingError, match="holds a run already"):
        RunDirectory(tmp_path)


def test_the_search_for_runs_is_bounded_and_finds_the_nearest(tmp_path, monkeypatch):
    """`resume=/` must not read a whole file system; links and runs are not entered."""
    for place in ("a/b/c", "d", "d/inside", ".hidden", "many/1", "many/2"):
        (tmp_path / place / "checkpoints").mkdir(parents=True)
        if not place.startswith("many"):
            (tmp_path / place / "config.yaml").touch()
    (tmp_path / "link").symlink_to(tmp_path / "d")
    runs = {tmp_path / "a" / "b" / "c", tmp_path / "d"}
    assert set(newest_runs(tmp_path, "checkpoints")) == runs
    assert newest_runs(tmp_path, "policy") == []
    monkeypatch.setattr(run_directory, "MOST_FOLDERS", 4)
    assert newest_runs(tmp_path, "checkpoints") == [tmp_path / "d"]


def failing(number, call, only=lambda handle: True):
    def fails(handle, *arguments):
        if only(handle):
            raise OSError(number, os.strerror(number))
        return call(handle, *arguments)

    return fails


def is_directory(handle):
    return stat.S_ISDIR(os.fstat(handle).st_mode)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_and_syncs_of_directories_holds_runs(
    tmp_path, monkeypatch, number
):
    monkeypatch.setattr(fcntl, "lockf", failing(number, fcntl.lockf))
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL, os.fsync, is_directory))
    with RunDirectory(tmp_path / "run", {"config.yaml": "a: 1"}) as directory:
        assert directory.holds_run
    assert not run_directory.in_use(tmp_path / "run")


def test_a_broken_disk_is_no_such_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "lockf", failing(errno.EIO, fcntl.lockf))
    with pytest.raises(SettingError, match="Input/output error"):
        RunDirectory(tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, os.fsync, is_directory))
    with pytest.raises(SettingError, match="Input/output error"):
        RunDirectory(tmp_path / "other")


def test_a_run_does_not_hide_those_in_folders_of_its_directory(tmp_path):
    for name in ("seed-0", "seed-1"):
        RunDirectory(tmp_path / "many" / name, {"config.yaml": ""}).close()
    for continued in (False, True):
        with pytest.raises(SettingError, match=r"holds runs \(seed-0, seed-1\); choose another"):
            RunDirectory(tmp_path / "many", {"config.yaml": ""}, continued=continued)
    assert sorted(each.name for each in (tmp_path / "many").iterdir()) == ["seed-0", "seed-1"]
    (tmp_path / "project" / "configs").mkdir(parents=True)
    (tmp_path / "project" / "configs" / "config.yaml").touch()  # of another program
    RunDirectory(tmp_path / "project").close()


def test_metrics_of_a_read_only_run_can_be_written_on_in_another_directory(tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 1}\n')
    metrics.chmod(0o444)
    (tmp_path / "new").mkdir()
    copy_history(metrics.parent, tmp_path / "new")
    copied = tmp_path / "new" / "metrics.jsonl"
    assert copied.read_text() == metrics.read_text() and copied.stat().st_mode & 0o200


@pytest.mark.parametrize(
    "name",
    ["policy/net.py", "policy-best/net.py", "checkpoints/step-000000000001/notes", "summary.json",
     "report.html", "metrics.jsonl", "events.out.tfevents.1", "eval/mine", "returns/mine"],
)  # fmt: skip
def test_files_that_a_run_would_replace_are_not_lost(tmp_path, name):
    place = tmp_path / "project"
    (place / name).parent.mkdir(parents=True)
    (place / name).write_text("mine")
    held = re.escape(name.partition("/")[0])
    for continued in (False, True)[: 1 if held == "checkpoints" else 2]:
        with pytest.raises(SettingError, match=f"project: holds {held}, which a run writes itself"):
            RunDirectory(place, {"config.yaml": ""}, continued=continued)
    assert [path.read_text() for path in place.rglob("*") if path.is_file()] == ["mine"]


def test_a_directory_with_other_files_and_empty_folders_takes_a_run(tmp_path):
    for name in ("policy", "checkpoints", ".hydra"):
        (tmp_path / name).mkdir()
    for name in ("train.log", "out.log", "train.py"):
        (tmp_path / name).write_text("mine")
    with RunDirectory(tmp_path, {"config.yaml": ""}) as directory:
        assert directory.holds_run


@pytest.mark.parametrize("inside", ["policy", "inner", "policy/a/b"])
def test_a_run_inside_of_another_is_refused(tmp_path, inside):
    with RunDirectory(tmp_path / "run", {"config.yaml": ""}):
        pass
    with pytest.raises(SettingError, match=r"lies inside of the run .*run; choose another"):
        RunDirectory(tmp_path / "run" / inside, {"config.yaml": ""})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "config.yaml"]
