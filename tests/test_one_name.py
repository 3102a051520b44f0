"""All imports are `steadyrl.…`, so a user's folders of the same names are never imported."""

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


def run_python(folder: Path, *command: object, root: Path | None = None) -> str:
    """Run a command in a folder, with `root` on PYTHONPATH; return its output."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if root is not None:
        env["PYTHONPATH"] = str(root)
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def create_user_packages(folder: Path) -> None:
    """Create packages named like our folders, which must not be imported."""
    for name in ("agents", "buffers", "core", "envs", "memory", "training", "scripts"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')\n")
    (folder / "train.py").write_text("raise SystemExit('train was imported')\n")
    (folder / "my_module.py").write_text(MODULE)


@pytest.mark.long
@pytest.mark.parametrize("start_by", ["its file", "its name"])
def test_user_packages_of_the_same_names_are_not_imported(tmp_path: Path, start_by: str) -> None:
    create_user_packages(tmp_path)
    program, root = ["-m", "steadyrl", "train"], ROOT
    if start_by == "its file":
        program, root = [ROOT / "train.py"], None
    run_python(tmp_path, *program, "env.id=my_module:Mine-v0", *SHORT, root=root)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 200)
    if start_by == "its file":  # evaluate finds modules of the working directory too
        arguments = ["run", "--episodes=1", "--env", "id=my_module:Mine-v0", "--json"]
        found = json.loads(run_python(tmp_path, ROOT / "scripts" / "evaluate.py", *arguments))
        assert found["episodes"] == 1


def test_a_second_clone_runs_its_own_code(tmp_path: Path) -> None:
    clone = tmp_path / "second clone"
    clone.mkdir()
    for name in (*OURS, "train.py"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, clone / name, symlinks=True)
        else:
            shutil.copy(source, clone / name)
    (clone / "configs" / "experiment" / "only_here.yaml").write_text("# @package _global_\n")
    assert "only_here" in run_python(tmp_path, clone / "train.py", "--help")
    assert "only_here" in run_python(clone, "-m", "steadyrl", "train", "--help")
    assert "only_here" not in run_python(tmp_path, ROOT / "train.py", "--help")


def test_runs_in_tests_do_not_unmap_libraries():
    """Mapping libraries again would take a second of each run, most of a test's time."""
    calls = {module.__name__: module.unmap_clean_pages for module in unmapping()}
    assert {"steadyrl.memory.cache_cleaner", "steadyrl.training.setup"} <= calls.keys()
    assert [name for name, call in calls.items() if call.__module__.startswith("steadyrl")] == []
