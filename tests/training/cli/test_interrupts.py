"""A real Ctrl-C ends every program with 130 and without a traceback, whatever it is importing."""

import os
import signal
import subprocess
import sys

import pytest
from command import ROOT, environment

from steadyrl.training.cli.programs import PROGRAMS

# Sends SIGINT to this process when a module is imported, and starts the command.
START = """
import os, runpy, signal, sys
target = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, *_):
        if name == target:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
program = sys.argv[1]
if program.endswith(".py"):
    del sys.argv[0]
    runpy.run_path(program, run_name="__main__")
else:
    sys.argv[0] = "steadyrl"
    runpy.run_module("steadyrl", run_name="__main__", alter_sys=True)
print("not interrupted")
"""
MODULES = {name: f"steadyrl.training.cli.{each.module}" for name, each in PROGRAMS.items()}


def interrupted(module, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", START, module, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    assert done.returncode == 130, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "not interrupted" not in done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_ends_a_program_while_it_is_imported(program):
    interrupted(MODULES[program], program, "--help")


@pytest.mark.parametrize("module", ["numpy", "steadyrl.training.run.signals"])
@pytest.mark.parametrize("started", ["doctor", "train", "scripts/plot.py", "train.py"])
def test_ctrl_c_ends_it_before_signals_are_handled(started, module):
    interrupted(module, started, "--help")


def test_ctrl_c_ends_a_check_and_the_environment_that_hangs_in_it(tmp_path):
    """The environment interrupts the command, and would sleep for ever."""
    done = subprocess.run(
        [sys.executable, "-m", "steadyrl", "envs", "check", "checked_envs:Interrupting-v0",
         f"env.kwargs.file={tmp_path / 'pid'}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIG_DFL)
