"""Tests have a time limit, also in native code, and the longest files run first."""

import subprocess
import sys

from command import ROOT, environment

from tests.conftest import LONGEST

# `PyDLL` keeps the GIL, as a destructor that joins a thread does: no signal handler runs.
ENDLESS = """
import ctypes

def test_that_ends():
    pass

def test_that_never_ends():
    ctypes.PyDLL(None).pause()
"""
WITH_A_LIMIT = """
import sys, conftest, pytest
conftest.LIMIT_SECONDS = 1.0
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]], plugins=[conftest]))
"""


def test_a_hanging_test_is_ended_and_named(tmp_path):
    file = tmp_path / "test_endless.py"
    file.write_text(ENDLESS)
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_LIMIT, str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",
        env=environment(),
        timeout=300,
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in test_that_never_ends" in done.stderr


def test_the_longest_files_exist():
    """A moved file would run last, and one process would wait for it."""
    files = [f"/{file.relative_to(ROOT)}" for file in (ROOT / "tests").rglob("test_*.py")]
    found = [sum(file.endswith(f"/{end}") for file in files) for end in LONGEST]
    assert found == [1] * len(LONGEST)
