"""A regular installation, independent of the checkout, trains from any directory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT

from steadyrl.training.cli.programs import PROGRAMS

# PPO, the sync backend and torch's own operations: in a new installation all machine code would be
# compiled again, for half a minute. `.ci/installed` trains with it.
EAGER = {"STEADYRL_ENGINE": "eager"}
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
    """Install a copy of the checkout with pip; return the target folder."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    # A copy, because a build leaves files beside the sources.
    unwanted = shutil.ignore_patterns(".*", "tests", "docs", "outputs", "build", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=unwanted)
    target = folder / "site"
    command = [sys.executable, "-m", "pip", *PIP, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def steadyrl(installed, folder, *arguments, first=()):
    """Run the installed command in a folder; imports look into the folders `first` first."""
    path = os.pathsep.join(map(str, (*first, installed)))
    return subprocess.run(
        [str(installed / "bin" / "steadyrl"), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | EAGER,
    )


def files(folder, ending):
    """Return the relative paths of files with this ending in every package."""
    parts = ("agents", "buffers", "configs", "core", "envs", "memory", "training")
    folders = (folder / "steadyrl" / part for part in parts)
    return {path.relative_to(folder) for each in folders for path in each.rglob(f"*{ending}")}


@pytest.mark.long
@pytest.mark.parametrize("ending", [".py", ".yaml"])
def test_every_module_and_configuration_is_installed(installed, ending):
    assert files(installed, ending) == files(ROOT, ending) != set()


@pytest.mark.long
def test_the_command_trains_in_the_working_directory(installed, tmp_path):
    done = steadyrl(installed, tmp_path, "train", *TRAINED)
    assert done.returncode == 0, done.stderr
    [path] = Path(tmp_path, "outputs").rglob("summary.json")
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 300)
    done = steadyrl(installed, tmp_path, "evaluate", str(path.parent), "--episodes", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["returns"]) == 2


def test_the_command_prints_help_and_rejects_invalid_names(installed, tmp_path):
    done = steadyrl(installed, tmp_path, "--help")
    assert "cartpole_ppo" in done.stdout
    assert "  steadyrl train agent=ppo" in done.stdout
    assert "python" not in done.stdout  # commands of a clone
    assert all(f"  steadyrl {name} " in done.stdout for name in PROGRAMS)
    done = steadyrl(installed, tmp_path, "experiment=cartpole_pp")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean cartpole_ppo?" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_is_a_subcommand(installed, tmp_path, program):
    (tmp_path / "scripts").mkdir()  # a user's folder must not be imported
    (tmp_path / "slow").mkdir()  # nor torch, which takes a second
    (tmp_path / "slow" / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = steadyrl(installed, tmp_path, program, "--help", first=[tmp_path / "slow"])
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: steadyrl {program}" in done.stdout
    assert "python " not in done.stdout  # commands of a clone


def test_every_user_script_is_a_subcommand():
    """All but those about this repository itself."""
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert scripts - {"benchmark", "soak"} == set(PROGRAMS)
