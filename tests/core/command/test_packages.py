"""A Python without the required packages, or too old, is answered in one line."""

import errno
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from steadyrl.core.command import packages
from steadyrl.core.errors import CommandError
from steadyrl.training.cli.failures import as_expected_error

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("script", ["train.py", "scripts/doctor.py", "scripts/evaluate.py"])
def test_a_clone_without_packages_names_one_and_the_command(tmp_path, script):
    bare = [sys.executable, "-E", "-s", "-S", str(ROOT / script)]  # without site-packages
    done = subprocess.run(bare, cwd=tmp_path, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    assert line.startswith("error: ") and f" is not installed for {sys.executable}: " in line
    assert "-m pip install -e " in line


def test_a_python_that_is_too_old_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    with pytest.raises(SystemExit) as ended, packages.required_packages():
        pytest.fail("nothing is imported")
    assert ended.value.code == 2
    assert "needs Python 3.11 or later, this is 3.10.4 (" in capsys.readouterr().err


def test_every_dependency_is_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {Requirement(text).name.removesuffix("-core") for text in project["dependencies"]}
    assert names <= set(packages.REQUIRED)
    assert project["requires-python"] == f">={'.'.join(map(str, packages.OLDEST_PYTHON))}"


def test_a_package_missed_later_is_no_bug():
    error = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    found = as_expected_error(error, None)
    assert isinstance(found, CommandError) and "torch is not installed for" in str(found)


def test_too_many_open_files_are_no_bug():
    found = as_expected_error(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), None)
    assert isinstance(found, CommandError) and str(found).endswith("open files (ulimit -n)")


def test_other_missing_modules_are_left_alone():
    with pytest.raises(ModuleNotFoundError, match="mine"), packages.required_packages():
        raise ModuleNotFoundError("No module named 'mine'", name="mine")
