"""The process of one environment: it obeys one-letter commands and dies with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from envs.faults import told, without_context
from envs.settings import EnvSettings
from envs.shared import ActionForm, SharedArrays, describe
from envs.slot import EnvSlot, step_time
from envs.types import EnvironmentFailedError, EnvSpec
from memory.errors import SettingError

# Commands. STEP, BEGIN and REPLAY name the row to write to (0 or 1) and are answered.
STEP = b"s"
BEGIN = b"e"  # + row + [seed, episode]: start this very episode
REPLAY = b"r"  # + row + actions: do them again
FORM = b"f"  # + the form of the actions to come
CUT = b"c"  # + [seed, episode]: the next step starts the episode after this one
QUIT = b"q"
# Answers.
DONE, BROKEN = b"d", b"b"

PR_SET_PDEATHSIG = 1
HELD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # while a process starts


class Job(NamedTuple):
    """All that a worker needs to know; without `memory` it only describes the spaces."""

    settings: EnvSettings
    seed: int
    env: int
    episode: int  # the first reset starts the one after it
    spec: EnvSpec | None
    memory: Any
    parent: int
    trial: bool = False  # without `memory`: measure a step instead of describing the spaces


def run_worker(job: Job, pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Run one environment until told to quit or until the parent is gone."""
    before = sys.exc_info()[1]  # a fork that replaces a broken environment brings its error along
    _detach(job, inherited)
    line = _Line(pipe)
    remarks: list[str] = []
    checked = job.settings.checked and job.env == 0 and job.spec is not None
    say = remarks.append if checked else None
    slot = EnvSlot(job.settings, seed=job.seed, index=job.env, say=say)
    try:
        slot.build()
        slot.cut(job.episode)
        line.answer(DONE + (step_time(slot) if job.trial else describe(slot)))
        if job.spec is not None:
            _Service(slot, SharedArrays(job.spec, job.memory), line, remarks).run()
    except _ParentGoneError:
        pass
    except BaseException as error:
        without_context(error, before)
        _report(error, line)
    finally:
        slot.close()


class _ParentGoneError(Exception):
    """There is nobody to work for any more. No error of an environment can be mistaken for it."""


class _Line:
    """The worker's end of the pipe to its parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def command(self) -> bytes:
        try:
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise _ParentGoneError from None

    def answer(self, message: bytes) -> None:
        try:
            self._pipe.send_bytes(message)
        except OSError:
            raise _ParentGoneError from None


def _detach(job: Job, inherited: Sequence[Connection]) -> None:
    """Leave Ctrl-C to the parent, die with it, and hold none of its other pipes open.

    A session of its own: whatever the environment starts can be ended together with it.
    """
    os.setsid()
    multiprocessing.current_process().daemon = False  # it may have children, and they end with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in HELD - {signal.SIGINT}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    for connection in inherited:
        connection.close()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job.parent:  # it died before we could ask to be told
        os._exit(0)
    gc.freeze()  # what came with the fork stays shared as long as nobody writes to it


class _Service:
    """Carry commands out."""

    def __init__(
        self, slot: EnvSlot, shared: SharedArrays, line: _Line, remarks: list[str]
    ) -> None:
        self._remarks = remarks  # to be sent with the next answer
        self._slot, self._shared, self._line = slot, shared, line
        self._progress = shared.progress[slot.index]
        self._form = ActionForm("<i8", ())

    def run(self) -> None:
        while True:
            message = self._line.command()
            command, rest = message[:1], message[1:]
            if command == QUIT:
                return
            if command == FORM:
                self._form = ActionForm.decode(rest)
            elif command == CUT:
                self._slot.seed, episode = json.loads(rest)
                self._slot.cut(episode)
            else:
                self._write(command, rest[0], rest[1:])
                self._progress[:] = self._slot.episode, self._slot.over
                self._line.answer(DONE + "\n".join(self._remarks).encode())
                self._remarks.clear()

    def _write(self, command: bytes, turn: int, rest: bytes) -> None:
        slot, rows = self._slot, self._shared.rows[turn]
        frame = rows.frames[slot.index]
        if command == REPLAY:
            slot.replay(self._form.read(rest), frame)
        elif command == BEGIN:
            slot.seed, episode = json.loads(rest)
            slot.cut(episode - 1)
            slot.start(frame)
        elif slot.over:
            # Told before it is tried: an episode whose reset breaks is not tried again.
            self._progress[0] = slot.episode + 1
            slot.advance(None, rows)
        else:
            action = self._shared.action(slot.index, self._form)
            slot.advance(slot.decoder.decode(action)[0], rows)


def _report(error: BaseException, line: _Line) -> None:
    """Tell the parent what broke, as text: the exception itself may not survive the journey."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    refused = None
    if isinstance(error, SettingError):
        refused = [error.field, str(error.value), error.reason]
    for_good = isinstance(error, EnvironmentFailedError)
    printable = "\n".join(map(_printable, trace.splitlines()))
    text = json.dumps([told(error), printable, refused, for_good, isinstance(error, Exception)])
    with contextlib.suppress(_ParentGoneError):
        line.answer(BROKEN + text.encode())


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line)
