"""Every import is `steadyrl.…`: folders and modules of a user's own are never taken for ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT
from mapped import unmapping

import steadyrl.training.setup  # noqa: F401  # what is looked for is in it too

OURS = ("agents", "buffers", "configs", "core", "envs", "memory", "steadyrl", "training")
SHORT = ("total_steps=200", "agent.compile=false", "eval.every=0", "run_dir=run", "threads=1")
MODULE = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

gym.register("Mine-v0", entry_point=CartPoleEnv, max_episode_steps=50)
"""


def started(folder: Path, *command: object, root: Path | None = None) -> str:
    """Run a command in a folder, with `root` on the path besides what is installed."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if root is not None:
        env["PYTHONPATH"] = str(root)
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def with_own_folders(folder: Path) -> None:
    """Give a user packages called as our folders are, which must not be imported."""
    for name in ("agents", "buffers", "core", "envs", "memory", "training", "scripts"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')\n")
    (folder / "train.py").write_text("raise SystemExit('train was imported')\n")
    (folder / "my_module.py").write_text(MODULE)


@pytest.mark.parametrize("started_by", ["its file", "its name"])
def test_folders_of_our_names_disturb_nothing_and_own_modules_are_found(
    tmp_path: Path, started_by: str
) -> None:
    with_own_folders(tmp_path)
    program = [ROOT / "train.py"] if started_by == "its file" else ["-m", "steadyrl", "train"]
    started(tmp_path, *program, "env.id=my_module:Mine-v0", *SHORT, root=ROOT)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 200)


def test_evaluations_find_own_modules_too(tmp_path: Path) -> None:
    with_own_folders(tmp_path)
    started(tmp_path, ROOT / "train.py", "env.id=my_module:Mine-v0", *SHORT)
    arguments = ["run", "--episodes=1", "--env", "id=my_module:Mine-v0", "--json"]
    found = json.loads(started(tmp_path, ROOT / "scripts" / "evaluate.py", *arguments))
    assert found["episodes"] == 1


def test_a_second_clone_runs_its_own_code_in_the_environment_of_the_first(tmp_path: Path) -> None:
    clone = tmp_path / "second clone"
    clone.mkdir()
    for name in (*OURS, "train.py"):
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, clone / name, symlinks=True)
        else:
            shutil.copy(place, clone / name)
    (clone / "configs" / "experiment" / "only_here.yaml").write_text("# @package _global_\n")
    assert "only_here" in started(tmp_path, clone / "train.py", "--help")
    assert "only_here" in started(clone, "-m", "steadyrl", "train", "--help")
    assert "only_here" not in started(tmp_path, ROOT / "train.py", "--help")


def test_what_runs_unmap_stays_mapped_between_tests():
    """Mapping programs again takes a second of each run: more than all else that a test does."""
    calls = {module.__name__: module.unmap_clean_pages for module in unmapping()}
    assert {"steadyrl.memory.cache_cleaner", "steadyrl.training.setup"} <= calls.keys()
    assert [name for name, call in calls.items() if call.__module__.startswith("steadyrl")] == []
