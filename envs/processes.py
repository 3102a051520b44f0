"""N environments, each in a process of its own, which can be timed out, killed and replaced."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from ctypes import c_uint8
from typing import Any

from numpy.typing import NDArray

from envs.checking import Remarks
from envs.faults import RestartBudget, WorkerError, refuse_other_spaces, spend_or_raise
from envs.making import brings_its_module, find_spec
from envs.replayable import ReplayableEnv
from envs.rows import Rows
from envs.settings import EnvSettings
from envs.shared import ActionForm, SharedArrays, read_description, read_spaces
from envs.types import EnvironmentFailedError, EnvSpec
from envs.worker import BEGIN, CUT, FORM, REPLAY, STEP, Job
from envs.worker_handle import SPAWN_SECONDS, WorkerHandle, no_process, start_methods
from memory.errors import NonFiniteError

LOG = logging.getLogger("steadyrl")
REPLAY_ACTIONS = 64  # replayed per message, so that the time limit can stay that of a step
CLOSE_SECONDS = 2.0


class ProcessVectorEnv(ReplayableEnv):
    """N environments in N processes; rows and actions travel through shared memory."""

    def __init__(
        self,
        settings: EnvSettings,
        *,
        seed: int,
        num_envs: int,
        methods: Sequence[str] | None = None,
    ) -> None:
        if not brings_its_module(settings.id):
            find_spec(settings.id)  # what registers it is loaded once, not in every process
        self._settings, self._seed = settings, seed
        self._methods = methods or start_methods()
        self._restarts = RestartBudget(settings.max_restarts)
        self._form: ActionForm | None = None
        self._say = Remarks(settings.id)
        self._workers: list[WorkerHandle] = []
        spec = self._describe(num_envs)
        context = multiprocessing.get_context(self._methods[0])
        try:
            self._memory = context.RawArray(c_uint8, SharedArrays.size(spec))
        except OSError as error:
            raise no_process(0, error) from error
        self._shared = SharedArrays(spec, self._memory)
        self._shared.progress[:] = -1, True
        super().__init__(spec, self._shared.rows)
        try:
            for index in range(num_envs):
                self._workers.append(self._hire(index, spec, self._memory))
            self._answers(lambda index, error: self._replace(index, error), starting=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process, by force if need be; safe to call twice and after a failure."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.quit()
        end = time.monotonic() + CLOSE_SECONDS
        for worker in workers:
            worker.kill(grace=max(0.0, end - time.monotonic()))

    # Workers: hired, waited for, replaced.

    def _describe(self, num_envs: int) -> EnvSpec:
        """Let a first process say what the spaces are: this one never makes an environment."""
        while True:
            try:
                told = ask_process(self._settings, self._methods)
                self._spaces = read_spaces(told)
                return read_description(told, self._settings, num_envs)
            except WorkerError as error:  # noqa: PERF203 - trying again is the point
                spend_or_raise(self._restarts, 0, 0, error)

    def _hire(self, index: int, spec: EnvSpec, memory: Any) -> WorkerHandle:
        episode = int(self._shared.progress[index, 0])
        job = Job(self._settings, self._seed, index, episode, spec, memory, os.getpid())
        return WorkerHandle(job, [worker.pipe for worker in self._workers], self._methods)

    def _deadline(self, *, starting: bool = False) -> float:
        return deadline(self._settings, self._methods if starting else ())

    def _answers(self, repair: Callable[[int, Exception], None], *, starting: bool = False) -> None:
        """Wait for one answer of every worker, repairing those that give none."""
        deadline = self._deadline(starting=starting)
        for index, worker in enumerate(self._workers):
            try:
                self._hear(worker.answer(deadline), starting=starting)
            except (WorkerError, EnvironmentFailedError) as error:  # noqa: PERF203
                repair(index, error)

    def _hear(self, told: bytes, *, starting: bool = False) -> None:
        """Take what comes with an answer: its spaces at the start, then remarks on its steps."""
        if starting:
            refuse_other_spaces(self._spaces, read_spaces(told))
        elif told:
            for remark in told.decode().split("\n"):
                self._say(remark)

    def _replace(self, index: int, error: Exception, turn: int | None = None) -> None:
        """Put a new process in the place of a broken one and, given a row, start an episode."""
        failure: Exception | None = error
        while failure is not None:
            spend_or_raise(self._restarts, index, self.steps, failure)
            self._workers[index].kill()
            try:
                worker = self._hire(index, self.spec, self._memory)
                self._workers[index] = worker
                self._hear(worker.answer(self._deadline(starting=True)), starting=True)
                if self._form is not None:
                    worker.send(FORM + self._form.encode())
                if turn is not None:
                    worker.send(STEP + bytes([turn]))
                    self._hear(worker.answer(self._deadline()))
                failure = None
            except (WorkerError, EnvironmentFailedError) as again:
                failure = again

    # The timeline.

    def _start_all(self, rows: Rows) -> None:
        for index, worker in enumerate(self._workers):
            worker.send(CUT + json.dumps([self._seed, self._progress(index)[0]]).encode())
            worker.send(STEP + bytes([self._turn]))
        self._answers(lambda index, error: self._restart(index, error, rows))

    def _launch(self, action: NDArray[Any], rows: Rows) -> None:
        self._tell_form(action)
        self._shared.put_actions(action)
        message = STEP + bytes([1 - self._turn])
        for worker in self._workers:
            worker.send(message)

    def _collect(self, rows: Rows) -> None:
        self._answers(lambda index, error: self._restart(index, error, rows))

    def _restart(self, index: int, error: Exception, rows: Rows) -> None:
        self._replace(index, error, self._turn)
        rows.set_reset(index)

    def _repair(self, env: int, error: NonFiniteError, rows: Rows) -> None:
        self._restart(env, error, rows)

    def _tell_form(self, actions: NDArray[Any]) -> None:
        if self._form is None or not self._form.matches(actions):
            self._form = ActionForm.of(actions)
            for worker in self._workers:
                worker.send(FORM + self._form.encode())

    # Saved state.

    def _progress(self, env: int) -> tuple[int, bool]:
        episode, over = self._shared.progress[env].tolist()
        return episode, bool(over)

    def _replay_all(
        self, episodes: list[int], actions: list[NDArray[Any] | None], rows: Rows
    ) -> None:
        turn = bytes([self._turn])
        lost = [past is None for past in actions]

        def ask(messages: list[bytes | None]) -> None:
            asked = [m is not None and not lost[env] for env, m in enumerate(messages)]
            for env, worker in enumerate(self._workers):
                if asked[env]:
                    worker.send(messages[env] or b"")
            deadline = self._deadline()
            for env, worker in enumerate(self._workers):
                if asked[env]:
                    try:
                        worker.answer(deadline)
                    except WorkerError as error:
                        lost[env] = True
                        self._replace(env, error)
                        self._shared.progress[env] = -1, True

        ask([BEGIN + turn + json.dumps([self._seed, episode]).encode() for episode in episodes])
        known = [past for past in actions if past is not None]
        if known:
            self._tell_form(known[0])
        longest = max(map(len, known), default=0)
        for start in range(0, longest, REPLAY_ACTIONS):
            chunks = [None if p is None else p[start : start + REPLAY_ACTIONS] for p in actions]
            ask([None if c is None or not len(c) else REPLAY + turn + c.tobytes() for c in chunks])

    def _cut(self, env: int, episode: int) -> None:
        self._workers[env].send(CUT + json.dumps([self._seed, episode]).encode())
        self._shared.progress[env] = episode, True


def deadline(settings: EnvSettings, methods: Sequence[str] = ()) -> float:
    """Return when an answer is late; given start methods, of a process that starts now."""
    slow = bool(methods) and methods[0] != "fork"
    return time.monotonic() + settings.step_timeout + (SPAWN_SECONDS if slow else 0.0)


def ask_process(
    settings: EnvSettings, methods: Sequence[str] = (), *, trial: bool = False
) -> bytes:
    """Let a process of its own make an environment and say what its spaces are, or its speed.

    So nothing an environment does can harm this process; WorkerError says what it did.
    """
    methods = methods or start_methods()
    job = Job(settings, 0, 0, -1, None, None, os.getpid(), trial)
    worker = WorkerHandle(job, [], methods)
    try:
        told = worker.answer(deadline(settings, methods))
        worker.quit()
        worker.kill(CLOSE_SECONDS)
        return told
    finally:
        worker.kill()


def describe_in_process(settings: EnvSettings) -> EnvSpec:
    """Say what one environment offers without making it here."""
    return read_description(ask_process(settings), settings, num_envs=1)
