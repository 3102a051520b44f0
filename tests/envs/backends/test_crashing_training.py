"""Training continues through crashes of environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_cartpole_is_solved_despite_crashes(tmp_path, backend):
    done = subprocess.run(
        [
            sys.executable,
            "train.py",
            "env.id=crashing_cartpole:CrashingCartPole-v0",
            f"env.backend={backend}",
            "env.max_restarts=100000",
            f"run_dir={tmp_path / 'run'}",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/helpers"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "crashed in a step" in (tmp_path / "run" / "train.log").read_text()
    assert summary["status"] == "finished"
    assert summary["eval_return_mean"] >= 475
