"""`os._exit` raises in user code, and ends the process everywhere else."""

from __future__ import annotations

import os
import threading

import pytest

from steadyrl.envs.user_exit import exits_raise


@pytest.fixture
def ended(monkeypatch):
    """Collect exit statuses instead of ending the process."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def test_user_code_raises(ended):
    with exits_raise(), pytest.raises(SystemExit, match=r"os\._exit\(3\) was called"):
        os._exit(3)
    assert not ended
    os._exit(4)
    assert ended == [4], "restored"


@pytest.mark.parametrize("file", ["/x/site-packages/simulator/core.py", os.__file__])
def test_libraries_and_python_end_the_process(ended, file):
    with exits_raise():
        exec(compile("os._exit(5)", file, "exec"), {"os": os})
    assert ended == [5]


def test_other_threads_end_the_process(ended):
    with exits_raise():
        thread = threading.Thread(target=lambda: os._exit(6))
        thread.start()
        thread.join()
    assert ended == [6]


def test_forked_processes_end():
    with exits_raise():
        child = os.fork()
        if child == 0:
            os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
