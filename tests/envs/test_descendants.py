"""Marks of processes: which processes end with one, and which do not."""

import subprocess
import sys

import pytest

LIMITED = """
import resource, subprocess, sys
from steadyrl.envs.descendants import RLIMIT_LOCKS, end_marked, new_mark

resource.setrlimit(RLIMIT_LOCKS, (64, resource.getrlimit(RLIMIT_LOCKS)[1]))
bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
for mark in (new_mark(), new_mark(family=False)):
    end_marked({mark}, families=True)
bystander.communicate(b"\\n")
print(bystander.returncode)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="marks are for Linux")
def test_a_limit_of_locks_that_somebody_has_set_is_no_mark():
    """As `docker --ulimit locks=64` sets it for all processes."""
    found = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert found.stdout == "0\n", found.stderr
