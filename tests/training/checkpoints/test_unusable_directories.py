"""Unusable run directories are rejected in one line and left unchanged."""

import errno
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
from command import ROOT, environment
from warm import run, start

from steadyrl.core.errors import SettingError
from steadyrl.training.checkpoints.run_directory import (
    RunDirectory,
    RunDirectoryInUseError,
    RunDirectoryLostError,
)

FILES = {".hydra/overrides.yaml": "[]\n", "config.yaml": "seed: 0\n"}


def refused(folder, *overrides, code=2):
    """Return the single error line of a rejected command."""
    process = start(folder, *overrides)
    out, err = process.communicate()
    assert process.returncode == code, out + err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in out + err, out + err
    return errors[0]


@contextmanager
def small_disk(folder, options):
    """Mount a small file system with these options."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(disk):
    """Fill the disk completely."""
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 4096)


@pytest.mark.parametrize("name", ["passwd", "passwd/below", "x" * 300, "~nobody-of-this-name/x"])
def test_invalid_directory_names_are_rejected(tmp_path, name):
    (tmp_path / "passwd").write_text("root\n")
    before = sorted(tmp_path.rglob("*"))
    assert "run_dir=" in refused(tmp_path, f"run_dir={name}")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-this-name/x"])
def test_names_that_no_directory_can_have_are_no_run_to_resume(tmp_path, name):
    assert "error: resume=" in refused(tmp_path, f"resume={name}")


def test_a_file_named_outputs_is_rejected(tmp_path):
    (tmp_path / "outputs").write_text("mine\n")
    assert "outputs is a file" in refused(tmp_path)
    assert (tmp_path / "outputs").read_text() == "mine\n"


def test_an_unusable_sweep_directory_is_named_by_its_key(tmp_path):
    (tmp_path / "passwd").write_text("root\n")
    line = refused(tmp_path, "-m", "seed=0,1", "hydra.sweep.dir=passwd/below")
    assert f"hydra.sweep.dir={tmp_path}/passwd/below: " in line and "passwd is a file" in line
    assert [path.name for path in tmp_path.iterdir()] == ["passwd"]


@pytest.mark.parametrize("options", ["size=64k", "nr_inodes=6"])
def test_a_full_disk_leaves_no_files_of_the_rejected_run(tmp_path, options):
    with small_disk(tmp_path, options) as disk:
        if options.startswith("size"):
            fill(disk)
        else:
            (disk / "filler").write_text("")
        before = sorted(disk.rglob("*"))
        line = refused(tmp_path, f"run_dir={disk / 'runs' / 'first'}")
        assert os.strerror(errno.ENOSPC) in line
        assert sorted(disk.rglob("*")) == before
        (disk / "filler").unlink()
        if options.startswith("size"):
            RunDirectory(disk / "runs" / "first", FILES).close()


def test_a_full_disk_leaves_an_existing_directory_empty(tmp_path):
    with small_disk(tmp_path, "size=64k") as disk:
        (disk / "mine").mkdir()
        fill(disk)
        with pytest.raises(SettingError, match="No space left"):
            RunDirectory(disk / "mine", FILES)
        assert list((disk / "mine").iterdir()) == []
        (disk / "filler").unlink()
        with RunDirectory(disk / "mine", FILES) as directory:
            assert (directory.path / "config.yaml").read_text() == FILES["config.yaml"]


def test_a_read_only_disk_is_rejected(tmp_path):
    with small_disk(tmp_path, "size=64k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert "cannot be written to" in refused(tmp_path, f"run_dir={disk / 'run'}")


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match="run_dir"):
        RunDirectory(tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists()


def test_a_rejection_leaves_the_other_runs_files(tmp_path):
    with RunDirectory(tmp_path / "run", FILES):
        before = sorted(tmp_path.rglob("*"))
        code = "import sys; from pathlib import Path\n"
        code += "from steadyrl.training.checkpoints.run_directory import *\n"
        code += "RunDirectory(Path(sys.argv[1]))"
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True
        )
        assert RunDirectoryInUseError.__name__ in other.stderr
        assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(SettingError, match="holds a run already"):
        RunDirectory(tmp_path / "run", FILES)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("change", ["deleted", "moved", "replaced"])
def test_a_deleted_or_moved_directory_is_noticed(tmp_path, change):
    with RunDirectory(tmp_path / "run", FILES) as directory:
        directory.validate_exists()
        directory.path.rename(tmp_path / "moved")
        if change == "replaced":
            directory.path.mkdir()
        with pytest.raises(RunDirectoryLostError, match="deleted or moved"):
            directory.validate_exists()


def test_deleting_its_directory_ends_a_run_at_the_next_log(tmp_path):
    overrides = ("run_dir=here", "total_steps=1e8", "eval.every=0")
    process = start(tmp_path, *overrides)
    for line in process.stdout:
        if line.startswith("step"):
            break
    (tmp_path / "here").rename(tmp_path / "gone")  # the run may be writing just now
    shutil.rmtree(tmp_path / "gone")
    out, err = process.communicate()
    assert process.returncode == 2, out + err
    assert f"error: run_dir={tmp_path / 'here'}: was deleted" in err


def wandering(tmp_path):
    """Return the settings of an environment that changes the working directory."""
    (tmp_path / "elsewhere").mkdir()
    return (
        "env.id=broken_envs:Wanderer-v0",
        f"env.kwargs.to={tmp_path / 'elsewhere'}",
        "env.backend=sync",
        "total_steps=600",
        "agent.learning_starts=500",
    )


@pytest.mark.long
def test_changing_the_working_directory_moves_no_other_path(tmp_path):
    overrides = (*wandering(tmp_path), "agent.hidden=[8]", "eval.every=0")
    run(tmp_path, *overrides, "run_dir=first", quick=False)
    more = ("-m", "seed=1,2", "init_from=first", "hydra.sweep.dir=all")
    run(tmp_path, *overrides, *more, quick=False)
    assert len(list((tmp_path / "all").glob("seed-*/summary.json"))) == 2
    program = [sys.executable, ROOT / "scripts" / "record.py"]
    options = ("first", "--out", "e.npz", "--episodes", "1", "--env", "id=broken_envs:Wanderer-v0")
    subprocess.run([*program, *options], cwd=tmp_path, env=environment(), check=True)
    assert (tmp_path / "e.npz").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_changing_the_working_directory_does_not_move_the_run(tmp_path):
    overrides = wandering(tmp_path)
    directory, summary, _ = run(tmp_path, *overrides, "run_dir=here")
    assert directory == tmp_path / "here" and summary["run_dir"] == str(directory)
    names = {path.name for path in directory.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "train.log"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert list((tmp_path / "elsewhere").iterdir()) == []
