"""Run train.py in a subprocess, as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Small and fast; tests override what they are about.
QUICK = (
    "agent=dqn",
    "env=cartpole",
    "device=cpu",
    "total_steps=2000",
    "agent.hidden=[16]",
    "agent.compile=false",
    "agent.learning_starts=200",
    "agent.train_every=8",
    "agent.updates_per_train=2",
    "agent.target_every=100",
    "eval.every=1000",
    "eval.episodes=3",
    "log.every=500",
)


def environment():
    """Return the environment variables of such a process."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(folder, *overrides, quick=True):
    """Start a run in `folder`."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *(QUICK if quick else ()), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    )


def run(folder, *overrides, code=0, quick=True):
    """Run to the end; return run directory, summary and output."""
    return finished(start(folder, *overrides, quick=quick), folder, code)


def finished(process, folder, code):
    """Wait for a run that must exit with `code`; return as `run` does."""
    out, err = process.communicate()
    assert process.returncode == code, out + err
    assert "Traceback" not in out + err
    summaries = sorted(Path(folder).rglob("summary.json"), key=lambda path: path.stat().st_mtime_ns)
    directory = summaries[-1].parent if summaries else None
    summary = json.loads(summaries[-1].read_text()) if summaries else None
    return directory, summary, out + err
