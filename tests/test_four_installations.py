"""Wheel, editable, not installed, second clone: training and evaluation work in each.

The working directory holds a user's own `agents/` and `envs/`. If openai-agents, which is
imported as `agents` too, is installed with the tests, so it is in each environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest
from command import ROOT

from tests.test_one_name import OURS, create_user_packages

PIP = ("install", "-q", "--no-index", "--no-deps", "--no-build-isolation")
SMALL = (
    "agent=ppo",
    "env.backend=sync",
    "device=cpu",
    "threads=1",
    "agent.compile=false",
    "agent.hidden=[8]",
    "agent.rollout_steps=50",
    "eval.every=0",
)

pytestmark = pytest.mark.slow


class Installation(NamedTuple):
    """An installation: commands and environment variables of its programs."""

    train: Sequence[str]
    evaluate: Sequence[str]
    env: dict[str, str]
    python: str


def clone(folder: Path) -> Path:
    """Copy the package and its programs as a clone has them."""
    folder.mkdir(parents=True)
    for name in (*OURS, "scripts", "train.py", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(source, folder / name)
    return folder


def python_of(folder: Path) -> str:
    """Create an environment that sees this one's libraries; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout
    # Appended to the path, so that packages of the new environment come first; `.pth` files of
    # this one, such as an editable installation of this checkout, are not read.
    Path(site.strip(), "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def pip_install(python: str, source: Path, *, editable: bool) -> None:
    """Install a clone into an environment."""
    options = ["-e"] if editable else []
    command = [sys.executable, "-m", "pip", "--python", python, *PIP, *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["wheel", "editable", "not installed", "second clone"])
def installation(request: pytest.FixtureRequest, tmp_path: Path) -> Installation:
    """Install the program in one of four ways."""
    python = python_of(tmp_path / "environment")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    first = clone(tmp_path / "first clone")
    if request.param in ("wheel", "editable"):
        pip_install(python, first, editable=request.param == "editable")
        command = str(Path(python).with_name("steadyrl"))
        return Installation((command, "train"), (command, "evaluate"), env, python)
    clone_ = first
    if request.param == "second clone":
        pip_install(python, first, editable=True)
        clone_ = clone(tmp_path / "second clone")
        (first / "core" / "errors.py").write_text("raise SystemExit('the first clone ran')\n")
    scripts = clone_ / "scripts"
    return Installation(
        (python, str(clone_ / "train.py")), (python, str(scripts / "evaluate.py")), env, python
    )


def run(installation: Installation, folder: Path, *command: str, path: str = "") -> str:
    """Run a program of the installation with `path` on PYTHONPATH; return its output."""
    env = installation.env | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(run_dir: Path) -> int:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    return summary["steps"]


def test_training_resuming_evaluating_and_user_code_work(
    installation: Installation, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    create_user_packages(folder)
    run(installation, folder, *installation.train, *SMALL, "total_steps=200", "run_dir=run")
    assert steps_of(folder / "run") == 200
    run(installation, folder, *installation.train, "resume=run", "total_steps=400")
    assert steps_of(folder / "run") == 400
    found = json.loads(
        run(installation, folder, *installation.evaluate, "run", "--episodes=2", "--json")
    )
    assert len(found["returns"]) == 2
    own_env = ("env.id=my_module:Mine-v0", "total_steps=200", "run_dir=own")
    run(installation, folder, *installation.train, *SMALL, *own_env)
    assert steps_of(folder / "own") == 200
    outside_agent = ("agent.name=outside.a2c", "total_steps=200", "eval.every=0", "run_dir=theirs")
    outside = str(ROOT / "tests" / "outside_algorithm")
    run(installation, folder, *installation.train, *outside_agent, path=outside)
    assert steps_of(folder / "theirs") == 200


def test_training_works_beside_openai_agents(installation: Installation, tmp_path: Path) -> None:
    # By its distribution: `agents` is this project's folder where the tests run from.
    try:
        version("openai-agents")
    except PackageNotFoundError:
        pytest.skip("openai-agents is not installed")
    program = (
        "import runpy, sys, agents\n"
        "agents.Runner\n"
        f"sys.argv = ['steadyrl', *{[*SMALL, 'total_steps=200', 'run_dir=run']!r}]\n"
        f"sys.path.insert(0, {str(Path(installation.train[-1]).parent)!r})\n"
        "from steadyrl.command import command\n"
        "command()\n"
    )
    run(installation, tmp_path, installation.python, "-c", program)
    assert steps_of(tmp_path / "run") == 200
