"""Standard streams that are closed: exit codes stay, and no file gets what is written to them."""

import subprocess
import sys

import pytest


def run(code, redirections):
    line = f'exec "$0" -c "$1" {redirections}'
    return subprocess.run(["bash", "-c", line, sys.executable, code]).returncode


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_refusal_keeps_its_exit_code(closed):
    refused = "import sys, steadyrl.command as c; sys.argv = ['steadyrl', 'compare', '/missing'];"
    assert run(f"{refused} c.command()", closed) == 2


def test_files_opened_later_do_not_get_what_is_printed(tmp_path):
    code = f"""
import os
from steadyrl.core.command.streams import open_standard_streams
open_standard_streams()
with open({str(tmp_path / "file")!r}, "wb") as file:
    os.write(1, b"one"), os.write(2, b"two")
os.system("echo three >&2 || touch {tmp_path / "child"}")
"""
    assert run(code, "<&- >&- 2>&-") == 0
    assert (tmp_path / "file").read_bytes() == b""
    assert not (tmp_path / "child").exists()


CLOSING = """
import os
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Closing(CartPoleEnv):
    def __init__(self):
        super().__init__()
        os.close(1)
        Closing.__init__ = CartPoleEnv.__init__

gym.register("Closing-v0", Closing, max_episode_steps=20)
"""


@pytest.mark.long
def test_an_environment_that_closes_a_stream_closes_no_file_of_the_run(tmp_path):
    (tmp_path / "closing_env.py").write_text(CLOSING)
    train = [
        sys.executable,
        "-m",
        "steadyrl",
        "train",
        "agent=dqn",
        "env.id=closing_env:Closing-v0",
    ]
    options = ["env.backend=sync", "total_steps=60", "eval.every=0", "report.at_end=false"]
    found = subprocess.run(
        [*train, *options, f"run_dir={tmp_path / 'run'}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(line.startswith("{") for line in lines)
