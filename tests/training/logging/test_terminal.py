"""Progress bar at every terminal width; output with missing encodings and closed pipes."""

import io
import logging
import os
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
from rich.console import Console

from steadyrl.core.clock import Activity
from steadyrl.training.cli import checkpoint, compare, evaluate, plot, population, report, tune
from steadyrl.training.cli.checks import doctor, envs
from steadyrl.training.cli.main import main
from steadyrl.training.cli.policy_files import export, record
from steadyrl.training.cli.shell import completion
from steadyrl.training.logging.display import Lines
from steadyrl.training.logging.progress_bar import AboveTheBar, Bar
from steadyrl.training.logging.screen import displayed, find_screen, to_terminal
from steadyrl.training.logging.terminal import (
    OutputError,
    Status,
    Stream,
    safe_stdout,
    score,
    status_texts,
)
from steadyrl.training.sweeps.job_run import say

LONG = 123_456_789
STATUS = Status(step=LONG // 2, steps_per_second=12_345.6, return_mean=-1234.5, memory_mb=12_345)


def show(display, status):
    """Let a display show this status, after steps at its speed."""
    display.begin(0, SimpleNamespace(running=0.0))
    for step in (1, status.step):
        display.activity.clock.now = step / status.steps_per_second
        display.on_steps(step, 0)
        display.show(status._replace(step=step))


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self):
        return self.now


def shown(width, status=STATUS, total=LONG, label=""):
    """Return the live line on a terminal of this width."""
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=True, color_system=None)
    bar = Bar(console, total, label, Activity(Clock()))
    show(bar, status)
    bar.close()
    # Print it again: a live line is removed when it is closed.
    with console.capture() as capture:
        console.print(bar)
    return capture.get()


def test_a_stream_of_the_program_may_only_write(monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append))
    with displayed(find_screen(), 1, own_process=False):
        logging.getLogger("steadyrl").info("hello")
    assert written == ["hello\n"]


@pytest.mark.parametrize("width", [40, 47, 60, 71, 80, 99, 200])
def test_the_bar_is_one_line_of_whole_words(width):
    text = shown(width)
    assert text.count("\n") == 1 and len(text.rstrip("\n")) < width
    assert "…" not in text and "..." not in text
    for word in ("61,728,394", " 50%", "left 1:23:20"):
        assert word in text


# Without colours, what is to do is blank; just below 50 %, the rest of a character is too.
HALF = {20: "━" * 10 + " " * 10, 30: "━" * 14 + " " * 16}


@pytest.mark.parametrize(
    ("width", "also"),
    [
        (60, ["return -1234.5"]),
        (80, ["return -1234.5", "12,346 steps/s", "RAM 12.3 GB"]),
        (99, ["return -1234.5", "12,346 steps/s", "RAM 12.3 GB", HALF[20]]),
        (200, ["return -1234.5", "12,346 steps/s", "RAM 12.3 GB", HALF[30]]),
    ],
)
def test_wider_terminals_show_more(width, also):
    text = shown(width)
    for word in also:
        assert word in text


def test_the_label_of_a_run_comes_first():
    text = shown(60, label="seed=3 (4/10)")
    assert text.split()[:3] == ["seed=3", "(4/10)", "61,728,394"] and text.count("\n") == 1


def test_huge_returns_are_shortened():
    text = shown(60, STATUS._replace(return_mean=-3.2e38))
    assert "return -3.2e+38" in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (0.02, "0.02"),
        (-0.0166667, "-0.0167"),
        (0.5, "0.5"),
        (9.0, "9.0"),
        (3.14159, "3.14"),
        (9.999, "10.0"),
        (-174.84, "-174.8"),
        (1234.6, "1234.6"),
        (500.0, "500.0"),
        (2e-7, "2e-07"),
        (-3.2e38, "-3.2e+38"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_returns_have_as_many_decimals_as_they_need(value, text):
    assert score(value) == text


def test_time_left_uses_the_expected_rate_if_known():
    assert status_texts(Status(50, 1.0, None, 0.0, 5.0), 100)["left"] == "left 0:10"
    assert status_texts(Status(50, 1.0, None, 0.0, 0.0), 100)["left"] == "left -:--"
    assert status_texts(Status(100, 1.0, None, 0.0, 0.0), 100)["left"] == "left 0:00"


def test_plain_lines_show_the_same_as_the_bar():
    output = io.StringIO()
    with to_terminal(Console(file=output)):
        show(Lines(LONG, activity=Activity(Clock())), STATUS)
    [*_, line] = output.getvalue().splitlines()
    assert line.startswith("step  61,728,394  50%  return -1234.5  ")
    assert line.endswith("left 1:23:20")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_unwritable_stdout_is_rejected_in_one_line():
    with open("/dev/full", "w") as full, redirect_stdout(full):
        with pytest.raises(OutputError, match="stdout: cannot be written to: No"), safe_stdout():
            print("42")
        print("and nothing is left to be written at exit")


def test_a_closed_pipe_is_ignored():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed, redirect_stdout(closed), safe_stdout():
        print("42")


def test_safe_stdout_flushes_at_its_end(tmp_path):
    with open(tmp_path / "answer", "w") as file, redirect_stdout(file):
        with safe_stdout():
            print("42")
        assert (tmp_path / "answer").read_text() == "42\n"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("encoding", "sign"), [("ascii", "\\xb1"), ("latin-1", "±")])
def test_messages_survive_a_terminal_without_unicode(live, encoding, sign):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=output, force_terminal=live, color_system=None, width=80)
    log = logging.getLogger("steadyrl")
    for screen in (console, Stream(output)):
        with to_terminal(screen):
            log.info("return 1.0 ± 2.0 – so far")
            log.info("and on")
    output.flush()
    text = output.buffer.getvalue().decode(encoding)
    assert text.count(f"return 1.0 {sign} 2.0 \\u2013 so far") == text.count("and on") == 2


@pytest.mark.parametrize("print_", [say, print])
def test_output_is_printed_in_any_encoding(monkeypatch, print_):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    with safe_stdout():
        print_("5 µs ± 1")
    assert output.buffer.getvalue() == b"5 \\xb5s \\xb1 1\n"


SCRIPTS = (
    *(checkpoint, compare, plot, population, report, tune),
    *(completion, doctor, envs, export, record),
)
PROGRAMS = {
    "train": main,
    **{m.__name__.rpartition(".")[2]: m.main for m in SCRIPTS},
    "evaluate": evaluate.main,
}


@pytest.mark.parametrize("stdout", ["full", "closed", "unread"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_unprintable_help_is_one_error_line_or_ignored(monkeypatch, capsys, program, stdout):
    reader, writer = os.pipe()
    os.close(reader)
    output = None if stdout == "closed" else os.fdopen(writer, "w")
    if stdout == "full":
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, writer)
        os.close(full)
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.setattr(sys, "stdout", output)
    call = (
        (lambda: PROGRAMS[program](lambda job: None)) if program == "train" else PROGRAMS[program]
    )
    code = 0
    try:
        call()
    except SystemExit as end:
        code = end.code or 0
    errors = capsys.readouterr().err
    if stdout == "full":
        assert (code, errors) == (
            2,
            "error: stdout: cannot be written to: No space left on device\n",
        )
    else:
        assert (code, errors) == (0, "")
    if output is None:
        os.close(writer)
    else:
        output.close()  # as at exit


def test_say_ignores_a_closed_stdout(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    say("one of many")


def test_a_stream_that_became_a_pipe_is_still_written(tmp_path):
    reader, writer = os.pipe()
    with open(tmp_path / "file", "w", encoding="ascii") as output:
        os.dup2(writer, output.fileno())  # the file object still assumes it can seek
        os.close(writer)
        with to_terminal(Stream(output)):
            logging.getLogger("steadyrl").info("1 ± 2")
    with os.fdopen(reader) as read:
        assert read.read() == "1 \\xb1 2\n"


def test_a_path_above_the_bar_stays_in_one_piece():
    """It is copied from there; the terminal wraps it, without line breaks in it."""
    output, path = io.StringIO(), "/home/somebody/outputs/" + 30 * "of a run/"
    console = Console(file=output, width=80, force_terminal=True, color_system=None)
    handler = AboveTheBar(console)
    handler.emit(logging.LogRecord("", logging.INFO, "", 0, "run: %s", (path,), None))
    assert output.getvalue() == f"run: {path}\n"
