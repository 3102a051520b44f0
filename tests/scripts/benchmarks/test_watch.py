"""`benchmark.py watch`: turns with and without monitoring, and what its calls take."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_turns_with_and_without_monitoring_are_compared():
    command = [sys.executable, "scripts/benchmark.py", "watch", "--steps", "50", "--rounds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if "steps/s (median)" in line] == ["watched", "blind"]
    calls = {line.strip().rpartition(" ms")[0].rpartition("  ")[0].strip() for line in lines}
    assert calls >= {"check", "on_update", "measure", "speed: on_update"}
