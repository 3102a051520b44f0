import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.plot import aggregate

ROOT = Path(__file__).parent.parent.parent


def test_the_interval_is_students():
    curve = aggregate([{1: 1.0, 2: 4.0}, {1: 3.0, 2: 4.0, 3: 9.0}])
    assert curve.steps.tolist() == [1, 2]
    assert curve.mean.tolist() == [2.0, 4.0]
    # Two runs, one degree of freedom: 12.706 · s/√2 with s = √2.
    assert curve.half[0] == pytest.approx(12.706, rel=1e-3)
    assert curve.half[1] == 0.0


def test_one_run_has_no_interval():
    assert np.all(aggregate([{1: 5.0}]).half == 0)


def test_the_command_draws_and_prints(tmp_path):
    for group, value in (("a", 1.0), ("b", 2.0)):
        for seed in range(3):
            run = tmp_path / f"{group}-{seed}"
            run.mkdir()
            line = {"step": 10, "eval/return_mean": value + seed}
            (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    command = [sys.executable, "scripts/plot.py", f"first={tmp_path}/a-*", f"second={tmp_path}/b-*"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "p.png")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "p.png").stat().st_size > 5000
    assert "| second | 3 | 3.0 |" in done.stdout
    refused = subprocess.run(
        [sys.executable, "scripts/plot.py", "x=/nowhere-*", "--out", "p.png"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert "no run directory matches" in refused.stderr
