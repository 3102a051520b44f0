"""Escape sequences are not executed; a failing log does not end the run."""

import io
import logging
import os
import resource
import subprocess
import sys

import pytest
from rich.console import Console

from steadyrl.training.checkpoints.summary import Summary
from steadyrl.training.cli.failures import has_traceback
from steadyrl.training.logging.logger import to_file
from steadyrl.training.logging.screen import to_terminal

log = logging.getLogger("steadyrl")
ESCAPES = "boo\x1b[2Jm\x1b]0;title\x07\r\x9b1mdone"


@pytest.mark.parametrize("live", [False, True])
def test_escapes_are_removed_on_the_terminal_and_escaped_in_the_log(tmp_path, live):
    output = io.StringIO()
    console = Console(file=output, force_terminal=live, color_system=None, width=200)
    with to_terminal(console), to_file(tmp_path / "train.log"):
        log.info("one\ntwo %s", ESCAPES)
        try:
            raise ValueError(ESCAPES)
        except ValueError:
            log.debug("it failed", exc_info=True)
    assert "boo [2Jm" in output.getvalue() and "Traceback" not in output.getvalue()
    log_text = (tmp_path / "train.log").read_text()
    assert r"boo\x1b[2Jm\x1b]0;title\x07\r\x9b1mdone" in log_text and "Traceback" in log_text
    for text in (output.getvalue(), log_text):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert any(line.startswith("two boo") for line in text.splitlines())


def test_unencodable_text_is_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "handlers", [])  # pytest's handler could not encode it either
    with to_file(tmp_path / "train.log"):
        log.info("a file called \udcff")
    assert "a file called" in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize("obstacle", ["handles", "disk"])
def test_an_unwritable_log_is_ignored(tmp_path, obstacle):
    path = "/dev/full" if obstacle == "disk" else str(tmp_path / "train.log")
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))" if obstacle == "handles" else ""
    code = (
        "import logging, resource, sys; from pathlib import Path\n"
        "from steadyrl.training.logging.logger import to_file\n"
        "with to_file(Path(sys.argv[1])):\n"
        f"    {limit or 'pass'}\n"
        "    logging.getLogger('steadyrl').info('lost')\n"
        "print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_links_are_not_followed(tmp_path):
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / "train.log").symlink_to(other)
    (tmp_path / ".summary.json.tmp").symlink_to(other)
    with to_file(tmp_path / "train.log"):
        log.info("lost")
    Summary("finished", str(tmp_path), "dqn", "CartPole-v1", 0).save(tmp_path)
    assert other.read_text() == "precious"
    assert (tmp_path / "summary.json").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
    mask = os.umask(0o022)
    os.umask(mask)
    return mask & 0o777 | 0o022


def test_a_summary_that_does_not_fit_leaves_no_partial_file(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    output = io.StringIO()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with to_terminal(Console(file=output)):
            Summary("finished", str(tmp_path), "dqn", "CartPole-v1", 0).save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write summary.json" in output.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_has_traceback_finds_the_errors_traceback_only(tmp_path):
    path = tmp_path / "train.log"
    error = KeyError("reward")
    assert not has_traceback(path, error)
    with to_file(path):
        try:
            raise OSError("an environment failed and was rebuilt")
        except OSError:
            log.debug("another error", exc_info=True)
        assert not has_traceback(path, error)
        try:
            raise error
        except KeyError:
            log.debug("the run failed", exc_info=True)
        assert has_traceback(path, error)
