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
