"""The command's own words: names of programs, and `help`."""

import sys

import pytest

from steadyrl.command import command
from steadyrl.training.cli.programs import PROGRAMS


def started(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/steadyrl", *arguments])
    with pytest.raises(SystemExit) as ended:
        command()
    return ended.value.code


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("evalute", "did you mean evaluate?"),
        ("docter", "did you mean doctor?"),
        ("xyzzy", "there are: train, evaluate, plot, "),
    ],
)
def test_a_word_that_is_no_program_is_refused_with_what_there_is(monkeypatch, capsys, word, hint):
    assert started(monkeypatch, word, "x=1") == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {word}: no such program; {hint}")
    assert len(line.splitlines()) == 1


def test_help_is_of_the_program_that_is_named(monkeypatch, capsys):
    assert not started(monkeypatch, "help", "doctor")
    assert "usage: steadyrl doctor" in capsys.readouterr().out


def test_help_lists_every_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/steadyrl", "help"])
    command()
    listed = capsys.readouterr().out
    for name, program in PROGRAMS.items():
        assert any(
            line.split() == ["steadyrl", name, *program.summary.split()]
            for line in listed.splitlines()
        )


def test_without_arguments_it_lists_the_programs_and_trains_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/steadyrl"])
    monkeypatch.setattr("steadyrl.loop.command", lambda: pytest.fail("trains"))
    command()
    listed = capsys.readouterr().out
    assert len(listed.splitlines()) < 24
    assert all(len(line) <= 80 for line in listed.splitlines())
    for name in ("train", *PROGRAMS):
        assert f"\n  steadyrl {name} " in listed
