"""Signals reach the process that handles them; those it forks end by them, at any time."""

import ctypes
import os
import signal

import pytest

from steadyrl.core.command.handler import Handler

NUMBER = signal.SIGUSR2


@pytest.fixture
def install():
    """Install a handler; return the signals that it was called with."""
    before = signal.getsignal(NUMBER)
    received = []

    def installed(ends_forked):
        signal.signal(NUMBER, Handler(received.append, ends_forked=ends_forked))
        return received

    yield installed
    signal.signal(NUMBER, before)


def ended(fork, child):
    """Fork a process that exits with what `child` returns; return its exit code."""
    pid = fork()
    if pid == 0:
        try:
            os._exit(child())
        finally:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raised():
    signal.raise_signal(NUMBER)
    return 0


def test_the_process_itself_gets_the_signal(install):
    received = install(True)
    signal.raise_signal(NUMBER)
    assert received == [NUMBER]


def test_a_forked_process_has_the_default_before_its_first_line(install):
    """Not a handler in Python, which would wait for the next bytecode."""
    install(True)
    assert ended(os.fork, lambda: signal.getsignal(NUMBER) == signal.SIG_DFL) == 1
    signal.signal(NUMBER, signal.SIG_IGN)  # another program's choice
    assert ended(os.fork, lambda: signal.getsignal(NUMBER) == signal.SIG_IGN) == 1


def test_a_process_forked_by_native_code_ends(install):
    received = install(True)
    assert ended(ctypes.PyDLL(None).fork, raised) == -NUMBER
    assert received == []


def test_a_forked_process_is_left_alone_where_the_signal_is_for_one_process(install):
    received = install(False)
    assert ended(os.fork, raised) == 0
    assert received == []
