"""`log.tensorboard=false`: no event files, and nothing imports TensorBoard."""

import subprocess
import sys

import pytest
from command import QUICK, environment

SCRIPT = """
import sys
sys.modules["tensorboard"] = None  # importing it raises
sys.argv = ["train.py", *sys.argv[1:]]
from steadyrl.loop import command
command()
"""


def run(folder, *overrides):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *QUICK, "total_steps=400", f"run_dir={folder}", *overrides],
        env=environment(),
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_a_run_without_event_files_does_not_need_tensorboard(tmp_path):
    ended = run(tmp_path / "run", "log.tensorboard=false")
    assert ended.returncode == 0, ended.stderr
    assert not list((tmp_path / "run").glob("events*"))
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert f"curves: python scripts/plot.py {tmp_path / 'run'}" in ended.stdout
    with_it = run(tmp_path / "other")
    assert with_it.returncode != 0 and "tensorboard" in with_it.stderr
