"""Worker process of one environment: executes one-letter commands, dies with its parent."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from steadyrl.core.command.handler import Handler
from steadyrl.core.command.parent import end_with_parent
from steadyrl.core.errors import SettingError, printable, show
from steadyrl.core.user_frames import shown_frames
from steadyrl.envs.arithmetic import flush_subnormals
from steadyrl.envs.backends.call_stack import write_stack_on_request
from steadyrl.envs.backends.single_env import SingleEnv
from steadyrl.envs.descendants import set_mark
from steadyrl.envs.encoding.step_buffer import SharedStepBuffers, StepBuffer
from steadyrl.envs.faults import error_summary
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import EnvironmentFailedError, EnvSpec, plain_spec
from steadyrl.envs.user_exit import exits_raise
from steadyrl.envs.worker_memory import WorkerCleaner

BUILD = b"b"  # executed at startup, without being sent
# Commands. STEP and REPLAY name the buffer to write to (0 or 1) and are replied to.
STEP = b"s"
REPLAY = b"r"  # + buffer + actions: repeat them
FORCE_RESET = b"c"  # + [seed, episode]: the next step starts the episode after this one
CHECK = b"k"  # check the next step against Gymnasium's API
QUIT = b"q"
# Replies.
OK, FAILED = b"d", b"b"

TRIAL_STEPS = 20
TRIAL_SECONDS = 0.1
# Signals that workers ignore. They are blocked while a worker starts.
LEFT_TO_TRAINER = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
}


class WorkerConfig(NamedTuple):
    """Arguments of a worker; without `memory` it only describes its spaces and ends."""

    settings: EnvSettings
    seed: int
    env: int
    episode: int  # the first reset starts the episode after this one
    spec: EnvSpec | None
    memory: Any
    trial: bool = False  # without `memory`: measure the step time instead


def run_worker(
    config: WorkerConfig, pipe: Connection, inherited: Sequence[Connection], mark: int, flush: bool
) -> None:
    """Run one environment until QUIT, a failure, or the end of the parent process.

    Processes it starts inherit the `mark`; `flush`: subnormal numbers count as 0, as in the parent.
    """
    _detach(inherited)
    write_stack_on_request(pipe)
    set_mark(mark)
    flush_subnormals(flush)
    _use_one_torch_thread()
    worker, cleaner = _Worker(config), WorkerCleaner()
    message = BUILD
    with exits_raise():
        try:
            while message != QUIT:
                reply = worker.handle(message)
                if reply:
                    pipe.send_bytes(reply)
                if reply[:1] == FAILED:
                    return
                cleaner.on_command()  # the trainer has its reply, and may learn meanwhile
                message = pipe.recv_bytes()
        except (EOFError, OSError):  # the pipe broke: the parent is gone
            return
        finally:
            worker.env.close()


def _detach(inherited: Sequence[Connection]) -> None:
    """Leave signals to the trainer, die with it, and close inherited pipes of other workers.

    The worker gets its own session, so that the environment's child processes can be killed too.
    """
    os.setsid()
    multiprocessing.current_process().daemon = False  # daemonic processes may not have children
    for number in LEFT_TO_TRAINER:
        _ignore(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_TRAINER)
    for connection in inherited:
        connection.close()
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    if not end_with_parent(signal.SIGKILL, parent.pid):
        os._exit(0)
    gc.freeze()  # keep forked pages shared: the collector would write to them


def _use_one_torch_thread() -> None:
    """Have torch compute in this thread: OpenMP would wait for threads lost in the fork."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _ignore(number: int) -> None:
    """Ignore a signal that the trainer gets too, but not in programs that the environment starts.

    systemd and Slurm send it to all processes: the trainer needs its workers for the step that it
    finishes before it saves, and then ends them.
    """
    signal.signal(number, Handler(lambda _: None, ends_forked=True))
    signal.siginterrupt(number, False)


class _Worker:
    """Executes commands."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._remarks: list[str] = []  # sent with the next reply
        checked = config.settings.checked and config.env == 0 and config.spec is not None
        warn = self._remarks.append if checked else None
        self.env = SingleEnv(config.settings, seed=config.seed, index=config.env, warn=warn)
        if config.spec is not None:
            self._shared = SharedStepBuffers(config.spec, config.memory)
            self._progress = self._shared.progress[config.env]

    def handle(self, message: bytes) -> bytes:
        """Execute a message and return the reply; empty: the parent does not wait for one."""
        try:
            return self._execute(message[:1], message[1:])
        except BaseException as error:
            self.env.name_code(error)
            return FAILED + _report(error)

    def _execute(self, command: bytes, rest: bytes) -> bytes:
        env = self.env
        if command == BUILD:
            env.build()
            env.force_reset(self._config.episode)
            return OK + (step_time(env) if self._config.trial else describe(env))
        if command == CHECK:
            env.check_next_step()
            return b""
        if command == FORCE_RESET:
            env.seed, episode = json.loads(rest)
            env.force_reset(episode)
            return b""
        self._write(command, rest[0], rest[1:])
        self._progress[:] = env.episode, env.needs_reset
        remarks = "\n".join(self._remarks)
        self._remarks.clear()
        return OK + remarks.encode()

    def _write(self, command: bytes, slot: int, rest: bytes) -> None:
        env, out, actions = self.env, self._shared.buffers[slot], self._shared.actions
        if command == REPLAY:
            known = np.frombuffer(rest, actions.dtype).reshape(-1, *actions.shape[1:])
            env.apply_actions(known, out.frames[env.index])
        elif env.needs_reset:
            # Published before the attempt: an episode whose reset fails is not tried again.
            self._progress[0] = env.episode + 1
            env.advance(None, out)
        else:
            (action,) = env.decoder.decode(actions[env.index : env.index + 1])
            env.advance(action, out)


def _report(error: BaseException) -> bytes:
    """Serialise an exception as text: the object itself may not be picklable."""
    trace = "".join(traceback.format_exception(error))
    refused = None
    if isinstance(error, SettingError):
        refused = [error.field, str(show(error.value, whole=True)), error.reason]
    fatal = isinstance(error, EnvironmentFailedError)
    trace = "\n".join(map(printable, trace.splitlines()))
    frames = list(map(printable, shown_frames(error)))
    parts = [error_summary(error), trace, refused, fatal, isinstance(error, Exception), frames]
    return json.dumps(parts).encode()


def describe(env: SingleEnv) -> bytes:
    """Serialise the environment's spaces, for `read_description`."""
    code = {method: list(env.code_of(method)) for method in ("step", "reset")}
    own = env.spaces, env.remarks, code
    parts = plain_spec(env.spec()), env.described_spaces(), env.encoder.limits, *own
    return json.dumps(parts).encode()


def step_time(env: SingleEnv) -> bytes:
    """Return the median seconds per step of a built environment, as text."""
    times: list[float] = []
    out = StepBuffer(env.spec(), 0)
    end = time.perf_counter() + TRIAL_SECONDS
    while len(times) < TRIAL_STEPS and (not times or time.perf_counter() < end):
        resets = env.needs_reset
        begin = time.perf_counter()
        env.advance(env.sample_action(), out)
        if not resets:
            times.append(time.perf_counter() - begin)
    return repr(statistics.median(times)).encode()
