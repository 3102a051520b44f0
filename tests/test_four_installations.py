"""As a wheel, editable, not installed, and as a second clone: everything works in each.

A user's own `agents/` and `envs/` lie where the programs are started. Where openai-agents, which is
imported as `agents` too, is installed beside the tests, it is so in each of these environments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from command import ROOT

from tests.test_one_name import OURS, with_own_folders

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


class Place(NamedTuple):
    """An installation: how its programs are started, and the environment variables they get."""

    train: Sequence[str]
    evaluate: Sequence[str]
    env: dict[str, str]
    python: str


def clone(folder: Path) -> Path:
    """Copy what a clone has of the package and its programs."""
    folder.mkdir(parents=True)
    for name in (*OURS, "scripts", "train.py", "pyproject.toml", "README.md", "LICENSE"):
        place = ROOT / name
        if place.is_dir():
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(place, folder / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(place, folder / name)
    return folder


def python_of(folder: Path) -> str:
    """Make an environment that is lent the libraries of this one; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout
    # Appended to the path, so that what is installed here comes first; `.pth` files of the lender,
    # an editable installation of this checkout among them, are not read.
    Path(site.strip(), "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def installed(python: str, source: Path, *, editable: bool) -> None:
    """Install a clone into an environment."""
    options = ["-e"] if editable else []
    command = [sys.executable, "-m", "pip", "--python", python, *PIP, *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["wheel", "editable", "not installed", "second clone"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Install the program one of four ways."""
    python = python_of(tmp_path / "environment")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    first = clone(tmp_path / "first clone")
    if request.param in ("wheel", "editable"):
        installed(python, first, editable=request.param == "editable")
        command = str(Path(python).with_name("steadyrl"))
        return Place((command, "train"), (command, "evaluate"), env, python)
    here = first
    if request.param == "second clone":
        installed(python, first, editable=True)
        here = clone(tmp_path / "second clone")
        (first / "core" / "errors.py").write_text("raise SystemExit('the first clone ran')\n")
    scripts = here / "scripts"
    return Place(
        (python, str(here / "train.py")), (python, str(scripts / "evaluate.py")), env, python
    )


def run(place: Place, folder: Path, *command: str, path: str = "") -> str:
    """Run a program there, with a folder more on its path; return what it printed."""
    env = place.env | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(run_dir: Path) -> int:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    return summary["steps"]


def test_training_resuming_evaluating_and_what_others_wrote(place: Place, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    with_own_folders(mine)
    run(place, mine, *place.train, *SMALL, "total_steps=200", "run_dir=run")
    assert steps_of(mine / "run") == 200
    run(place, mine, *place.train, "resume=run", "total_steps=400")
    assert steps_of(mine / "run") == 400
    found = json.loads(run(place, mine, *place.evaluate, "run", "--episodes=2", "--json"))
    assert len(found["returns"]) == 2
    own = ("env.id=my_module:Mine-v0", "total_steps=200", "run_dir=own")
    run(place, mine, *place.train, *SMALL, *own)
    assert steps_of(mine / "own") == 200
    theirs = ("agent.name=outside.a2c", "total_steps=200", "eval.every=0", "run_dir=theirs")
    outside = str(ROOT / "tests" / "outside_algorithm")
    run(place, mine, *place.train, *theirs, path=outside)
    assert steps_of(mine / "theirs") == 200


def test_openai_agents_beside_it(place: Place, tmp_path: Path) -> None:
    try:
        from agents import Runner
    except ImportError:
        pytest.skip("openai-agents is not installed")
    assert Runner is not None
    program = (
        "import runpy, sys, agents\n"
        "agents.Runner\n"
        f"sys.argv = ['steadyrl', *{[*SMALL, 'total_steps=200', 'run_dir=run']!r}]\n"
        f"sys.path.insert(0, {str(Path(place.train[-1]).parent)!r})\n"
        "from steadyrl.command import command\n"
        "command()\n"
    )
    run(place, tmp_path, place.python, "-c", program)
    assert steps_of(tmp_path / "run") == 200
