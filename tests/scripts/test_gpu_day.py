"""scripts/gpu_day.sh: its reduced form runs without a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "date", "dirname", "git", "grep", "mkdir", "tail", "tee", "timeout")


def test_gpu_day_needs_only_standard_tools_and_python3(tmp_path):
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"the script needs {tool}"
        (tmp_path / tool).symlink_to(found)
    python = tmp_path / "python3"
    python.write_text(f'#!{tmp_path / "bash"}\necho "$@" >>{tmp_path}/calls\nexit 1\n')
    python.chmod(0o755)
    done = subprocess.run(
        [str(tmp_path / "bash"), str(ROOT / "scripts" / "gpu_day.sh"), str(tmp_path / "day")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr  # every command of this fake Python fails
    log = (tmp_path / "day" / "gpu_day.log").read_text()
    assert "not found" not in done.stderr + log and "failed to run" not in log
    calls = (tmp_path / "calls").read_text()
    assert "-c import torch" in calls and "scripts/benchmark.py card" in calls


@pytest.mark.slow
def test_the_reduced_form_writes_its_page(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_day.sh"), "--reduced", str(tmp_path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PATH": path},
        capture_output=True,
        text=True,
    )
    page = (tmp_path / "GPU_DAY.md").read_text()
    assert done.returncode == 0, (tmp_path / "gpu_day.log").read_text()[-3000:]
    assert "failed" not in page
    table = [line.split("|") for line in page.splitlines() if line.startswith("|")][2:]
    assert {row[1].split(",")[0].strip() for row in table} >= {"DQN", "PPO"}
    assert len(table) >= 3
    for row in table:
        assert float(row[3].replace(",", "")) > 0 and float(row[4].replace(",", "")) > 0
    assert page.count("\n- ") >= 3, "skipped parts are listed"
