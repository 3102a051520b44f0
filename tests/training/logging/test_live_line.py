"""A run that waits, on a real terminal and in a pipe; a terminal that closes ends nothing."""

import json
import os
import pty
import re

import pytest
import warm
from command import QUICK

WAITING = (
    *(each for each in QUICK if not each.startswith(("env=", "eval.", "total_steps="))),
    "env.id=waiting_env:Waiting-v0",
    "env.backend=sync",
    "eval.every=0",
    "total_steps=1",
    "checkpoint.every=0",
    "run_dir=here",
)


def started(folder, terminal=None):
    """Start a run of one step that waits for `steps`, with pipes or on a terminal."""
    os.mkfifo(folder / "steps")
    arguments = (*WAITING, f"env.kwargs.pipe={folder / 'steps'}")
    return warm.Process(folder, arguments, {"TERM": "xterm", "COLUMNS": "100"}, terminal)


def take_step(folder):
    """Let the only step end."""
    (folder / "steps").write_bytes(b"")


def ended(process, folder):
    """Return the summary of a run that must finish."""
    assert process.wait() == 0
    return json.loads((folder / "here" / "summary.json").read_text())


@pytest.fixture
def terminal(tmp_path):
    """A run in a terminal, and a function that reads it until a text comes."""
    ours, theirs = pty.openpty()
    process = started(tmp_path, theirs)
    os.close(theirs)
    seen = ""

    def until(text):
        nonlocal seen
        while text not in seen:
            try:
                seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(ours, 1 << 16).decode())
            except OSError:  # nobody writes any more
                raise AssertionError(seen) from None
        return seen

    yield process, until, ours
    process.kill()
    process.wait()


def test_a_terminal_counts_the_seconds_of_a_step_that_waits(terminal, tmp_path):
    process, until, ours = terminal
    until("waiting for the environments 0:01")
    until("waiting for the environments 0:02")  # it counts
    take_step(tmp_path)
    assert "Traceback" not in until("curves: tensorboard")
    assert ended(process, tmp_path)["steps"] == 1
    os.close(ours)


def test_a_terminal_that_closes_ends_nothing(terminal, tmp_path):
    process, until, ours = terminal
    until("waiting for the environments 0:01")
    os.close(ours)
    take_step(tmp_path)
    assert ended(process, tmp_path)["status"] == "finished"


def test_a_pipe_has_one_line_of_a_step_that_waits(tmp_path):
    process = started(tmp_path)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "waiting for the environments ...\n":
            break
    take_step(tmp_path)
    rest, errors = process.communicate()
    assert ended(process, tmp_path)["steps"] == 1
    assert errors == "" and "waiting for" not in "".join(lines[:-1]) + rest
