"""Faults of the faulty environment."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading

import numpy as np


class TwoArgumentsError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class UnpicklableError(Exception):
    def __init__(self):
        super().__init__("cannot travel")
        self.lock = threading.Lock()


class SpeechlessError(Exception):
    def __str__(self):
        raise RuntimeError("not even this works")


RAISED = {
    "unpicklable": UnpicklableError,
    "speechless": SpeechlessError,
    "eof": lambda: EOFError("the file of the simulator ends"),
    "broken_pipe": lambda: BrokenPipeError(32, "the simulator is gone"),
    "connection_reset": lambda: ConnectionResetError(104, "the simulator hung up"),
    "terminal": lambda: RuntimeError("\x1b[2J\x1b]0;yours\x07 wiped\r\nthe screen"),
    "cancelled": lambda: asyncio.CancelledError("a task of mine"),
}


def break_down(kind):
    """Raise, end or hang, or return a function that corrupts a step's tuple (obs, reward, …)."""
    if kind == "raise":
        raise TwoArgumentsError("this", "that")
    if kind in RAISED:
        raise RAISED[kind]()
    if kind == "sys_exit":
        sys.exit(3)
    if kind == "exit":
        ctypes.CDLL(None)._exit(3)  # not by Python's os._exit, which raises in user code
    if kind == "os_exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        threading.Event().wait()
    if kind == "until_told":
        signal.sigwait([signal.SIGUSR2])
        return lambda row: None
    return {
        "nan_reward": lambda row: row.__setitem__(1, float("nan")),
        "huge_reward": lambda row: row.__setitem__(1, -1e39),
        "inf_observation": lambda row: row[0].__setitem__(0, np.inf),
        "wrong_shape": lambda row: row.__setitem__(0, np.zeros(5, np.float32)),
        "wrong_type": lambda row: row.__setitem__(1, "much"),
    }[kind]
