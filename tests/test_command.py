"""The command's own words: names of programs, and `help`."""

import os
import subprocess
import sys

import pytest
from command import environment

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


def of_shell(line, folder):
    """Run a line of a shell that has the interpreter as $PYTHON; return its code and stderr."""
    variables = environment() | {"PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", "-c", line], cwd=folder, env=variables, capture_output=True, text=True
    )
    return done.returncode, done.stderr


def test_the_list_of_programs_is_printed_to_a_closed_pipe(tmp_path):
    """Its reader ends before the command writes."""
    reader, writer = os.pipe()
    os.close(reader)
    command_ = [sys.executable, "-m", "steadyrl"]
    done = subprocess.run(
        command_, stdout=writer, stderr=subprocess.PIPE, env=environment(), cwd=tmp_path
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_the_list_of_programs_on_a_full_disk_is_one_line(tmp_path):
    line = "error: stdout: cannot be written to: No space left on device\n"
    assert of_shell('"$PYTHON" -m steadyrl > /dev/full', tmp_path) == (2, line)


@pytest.mark.parametrize("program", ["doctor", "train total_steps=1000", "compare ."])
def test_a_removed_working_directory_is_one_line(tmp_path, program):
    folder = tmp_path / "gone"
    folder.mkdir()
    assert of_shell(f'rmdir {folder}; "$PYTHON" -m steadyrl {program}', folder) == (
        2,
        "error: the working directory cannot be found (No such file or directory): cd to one that "
        "exists\n",
    )
