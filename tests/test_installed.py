"""Installed for good, and not only linked to a checkout, the command trains from any directory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT

from steadyrl.command import PROGRAMS

# Whose rows no kernel makes, and no replay keeps: both would be compiled anew, for half a minute.
TRAINED = (
    "agent=ppo",
    "env.backend=sync",
    "device=cpu",
    "agent.compile=false",
    "agent.rollout_steps=50",
    "total_steps=300",
    "eval.every=0",
)
PIP = ("install", "-q", "--no-index", "--no-deps", "--no-build-isolation")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install a copy of the checkout, as `pip install .` does, and return where it went."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    # A copy, because a build leaves its traces beside the sources.
    unwanted = shutil.ignore_patterns(".*", "tests", "docs", "outputs", "build", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=unwanted)
    target = folder / "site"
    command = [sys.executable, "-m", "pip", *PIP, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def steadyrl(installed, folder, *arguments):
    """Run the installed command in a folder."""
    return subprocess.run(
        [str(installed / "bin" / "steadyrl"), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
    )


def files(folder, ending):
    """Return the paths of such files in every package, as they stand in the folder."""
    parts = ("agents", "buffers", "configs", "core", "envs", "memory", "training")
    within = (folder / "steadyrl" / part for part in parts)
    return {path.relative_to(folder) for each in within for path in each.rglob(f"*{ending}")}


@pytest.mark.parametrize("ending", [".py", ".yaml"])
def test_every_module_and_configuration_is_installed(installed, ending):
    assert files(installed, ending) == files(ROOT, ending) != set()


def test_the_command_trains_where_it_is_called(installed, tmp_path):
    done = steadyrl(installed, tmp_path, "train", *TRAINED)
    assert done.returncode == 0, done.stderr
    [path] = Path(tmp_path, "outputs").rglob("summary.json")
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 300)
    done = steadyrl(installed, tmp_path, "evaluate", str(path.parent), "--episodes", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["returns"]) == 2


def test_the_command_helps_and_refuses(installed, tmp_path):
    done = steadyrl(installed, tmp_path, "--help")
    assert "cartpole_ppo" in done.stdout
    done = steadyrl(installed, tmp_path, "experiment=cartpole_pp")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean cartpole_ppo?" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_is_there_by_its_name(installed, tmp_path, program):
    (tmp_path / "scripts").mkdir()  # what the user calls so is not ours
    done = steadyrl(installed, tmp_path, program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: steadyrl {program}" in done.stdout


def test_every_script_that_is_a_program_can_be_called():
    """All but those that are about this repository."""
    there = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert there - {"benchmark", "soak"} == set(PROGRAMS)
