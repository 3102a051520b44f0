"""Errors as they are shown: one line, on a terminal in lines that break between words."""

import io
import sys

import pytest

from steadyrl.core.errors import CommandError, exit_with, interrupt_kept


def test_a_long_refusal_breaks_between_words_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    message = "a word and " * 12 + "/a/path" * 15 + " is missing; install it: "
    command = "pip install -e '.[a,b]' --constraint " + "c" * 70
    error = CommandError(message + command).with_details("python train.py " + "x=1 " * 40)
    for watched in (False, True):
        stderr.truncate(0), stderr.seek(0)
        stderr.isatty = lambda watched=watched: watched
        with pytest.raises(SystemExit):
            exit_with(error)
        lines = stderr.getvalue().splitlines()
        assert len(lines) == (6 if watched else 2)
    *text, path, end, own, detail = lines
    assert all(len(line) <= 80 for line in text)
    assert (path.strip(), end.strip()) == ("/a/path" * 15, "is missing; install it:")
    assert own == f"  {command}"
    assert " ".join(line.strip() for line in lines[:-2]).startswith("error: a word and a word")
    assert detail.count("x=1") == 40


def test_an_error_that_replaces_an_interrupt_does_not_hide_it():
    with pytest.raises(KeyboardInterrupt), interrupt_kept():
        try:
            raise KeyboardInterrupt
        finally:
            raise ValueError("cleaning up failed")


def test_an_interrupt_that_a_caller_handles_replaces_no_error():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(ValueError, match="another"), interrupt_kept():
            try:
                raise KeyError
            except KeyError:
                raise ValueError("another") from None
