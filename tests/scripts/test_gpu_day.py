"""The day with a GPU cannot rot: in its reduced form it runs to its page without one."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_reduced_form_runs_to_its_page(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_day.sh"), "--reduced", str(tmp_path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    page = (tmp_path / "GPU_DAY.md").read_text()
    assert done.returncode == 0, (tmp_path / "gpu_day.log").read_text()[-3000:]
    assert "failed" not in page
    rows = [line.split("|") for line in page.splitlines() if line.startswith("|")][2:]
    assert {row[1].split(",")[0].strip() for row in rows} >= {"DQN", "PPO"}
    assert len(rows) >= 3
    for row in rows:
        assert float(row[3].replace(",", "")) > 0 and float(row[4].replace(",", "")) > 0
    assert page.count("\n- ") >= 3, "it says what it skipped"
