"""Run a check in a process of its own: an environment may crash, hang, or print."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from steadyrl.core.command.parent import end_with_parent
from steadyrl.core.errors import ExpectedError, describe, one_line
from steadyrl.core.user_frames import place_and_frames
from steadyrl.envs.backends.call_stack import request_stack, write_stack_on_request
from steadyrl.envs.backends.worker_handle import kill_group, start_methods
from steadyrl.envs.descendants import end_marked, new_mark, set_mark
from steadyrl.envs.faults import error_summary
from steadyrl.envs.settings import EnvSettings

OK, NOTE, FAULT, ABSENT = "ok", "note", "fault", "absent"
HUNG = "no answer"


class Finding(NamedTuple):
    """One line of the report: `ok`, `note`, `fault`, or `absent` (not possible, nothing wrong)."""

    level: str
    check: str
    text: str


# A check yields (level, text).
Check = Callable[[EnvSettings], Iterable[tuple[str, str]]]


class _Collected(logging.Handler):
    """Collects warnings of the log instead of printing them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(one_line(record.getMessage()))


def isolated(name: str, check: Check, settings: EnvSettings, seconds: float) -> list[Finding]:
    """Return the findings of a check; a crash, a hang or an exception of its process is one."""
    context: Any = multiprocessing.get_context(start_methods()[0])
    here, there = context.Pipe(duplex=False)
    mark = new_mark(family=False)
    process = context.Process(target=_run, args=(check, settings, there, os.getpid(), mark))
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            place, _ = place_and_frames(request_stack(process.pid, here, _run))
            hung = f"{HUNG} within {seconds:g} s" + (place and f" ({place})")
            return [Finding(FAULT, name, one_line(hung))]
        found = json.loads(here.recv_bytes())
    except (EOFError, OSError):
        process.join(5.0)
        return [Finding(FAULT, name, _death(process.exitcode))]
    finally:
        here.close()
        process.kill()
        process.join()
        kill_group(process.pid, ended=True)
        end_marked({mark}, families=True)  # daemons, and programs of workers
    return [Finding(level, name, one_line(text)) for level, text in found]


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process exited with code {code}"


def _run(check: Check, settings: EnvSettings, pipe: Connection, parent: int, mark: int) -> None:
    """Run a check and send what it finds; processes it starts inherit the mark."""
    os.setsid()  # Ctrl-C is for the parent, which ends this process
    if not end_with_parent(signal.SIGKILL, parent):
        os._exit(0)
    set_mark(mark)
    write_stack_on_request(pipe)
    os.dup2(2, 1)  # stdout is the report's
    sys.stdout = sys.stderr
    log, collected = logging.getLogger("steadyrl"), _Collected()
    log.addHandler(collected)
    log.propagate = False
    warnings.simplefilter("ignore")  # a check that is about warnings catches them
    found: list[tuple[str, str]] = []
    try:
        found.extend(check(settings))
    except ExpectedError as error:
        found.append((FAULT, str(error)))
    except BaseException as error:  # SystemExit too: this is user code
        text = error_summary(error) if isinstance(error, Exception) else describe(error)
        found.append((FAULT, text))
    found += [(NOTE, text) for text in dict.fromkeys(collected.texts)]
    pipe.send_bytes(json.dumps(found).encode())
    pipe.close()
    os._exit(0)  # whatever threads the environment left running
