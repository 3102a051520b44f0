"""N environments, each in a process of its own, which can be timed out, killed and replaced."""

from __future__ import annotations

import json
import multiprocessing
from ctypes import c_uint8
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.errors import NonFiniteError
from steadyrl.core.saved import LARGEST_SEED, Saved
from steadyrl.envs.backends.single_env import Remarks
from steadyrl.envs.backends.worker import CUT, REPLAY, STEP, Assignment
from steadyrl.envs.backends.worker_handle import (
    CLOSE_SECONDS,
    Description,
    WorkerHandle,
    ask_process,
    deadline,
    interrupts_held,
    kill_all,
    no_shared_memory,
    read_description,
)
from steadyrl.envs.encoding.step_buffer import Row, SharedRows, progress_in
from steadyrl.envs.faults import Faults, WorkerError, refuse_other_spaces
from steadyrl.envs.registration import brings_its_module, find_spec
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.envs.vector import Backend

REPLAY_ACTIONS = 64  # replayed per message, so that the time limit can stay that of a step


class ProcessBackend(Backend):
    """N environments in N processes; rows and actions travel through shared memory."""

    replays = True
    works_alone = True
    timeouts = 2  # the first of which ends with another process in the place of one that hangs

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        if not brings_its_module(settings.id):
            find_spec(settings.id)  # what registers it is loaded once, not in every process
        self.faults = Faults(settings.max_restarts, settings.role)
        self._settings, self._seed = settings, seed
        self._say = Remarks(settings.id)
        self._workers: list[WorkerHandle] = []
        self.spec, self.limits, self._spaces = self._describe()
        try:
            self._memory = multiprocessing.RawArray(c_uint8, SharedRows.size(self.spec))
        except OSError as error:
            raise no_shared_memory(error) from error
        self._shared = SharedRows(self.spec, self._memory)
        self._shared.progress[:] = -1, True
        try:
            for index in range(settings.num_envs):
                self._hire(index)
            self._answers()
        except BaseException:
            self.close()
            raise

    def rows(self) -> tuple[Row, Row]:
        """Return the two rows, in the memory that the processes share."""
        return self._shared.rows

    def close(self) -> None:
        """End every process, by force if need be; safe to call twice and after a failure."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.quit()
        kill_all(workers, CLOSE_SECONDS)

    # Workers: hired, waited for, replaced.

    def _describe(self) -> Description:
        """Let a first process say what the spaces are: this one never makes an environment."""
        while True:
            try:
                return read_description(ask_process(self._settings), self._settings)
            except WorkerError as error:  # trying again is the point
                self.faults.excuse(0, error)

    def _hire(self, index: int) -> WorkerHandle:
        """Start a process and put it in its place, both or neither: else nobody would end it."""
        episode = int(self._shared.progress[index, 0])
        task = Assignment(self._settings, self._seed, index, episode, self.spec, self._memory)
        with interrupts_held():
            worker = WorkerHandle(task, [other.pipe for other in self._workers])
            self._workers[index : index + 1] = [worker]
        return worker

    def _answers(self, row: Row | None = None) -> None:
        """Wait for one answer of every worker, replacing those that give none; no row: they start.

        A process is replaced when its error has been handled, or the next would tell of it as well.
        """
        late = deadline(self._settings, starting=row is None)
        for index, worker in enumerate(self._workers):
            failure = self._hear(worker, late, starting=row is None)
            if failure is not None:
                self._replace(index, failure, row)

    def _hear(
        self, worker: WorkerHandle, late: float, *, starting: bool = False
    ) -> Exception | None:
        """Take its spaces at the start, then remarks on its steps; return what broke instead."""
        self.answers += 1
        try:
            told = worker.answer(late)
            if starting:
                refuse_other_spaces(self._spaces, read_description(told, self._settings).spaces)
            elif told:
                for remark in told.decode().split("\n"):
                    self._say(remark)
        except (WorkerError, EnvironmentFailedError) as error:
            return error
        return None

    def _replace(self, index: int, error: Exception, row: Row | None = None) -> None:
        """Put a new process in the place of a broken one and, given a row, start an episode."""
        failure: Exception | None = error
        while failure is not None:
            self.faults.excuse(index, failure)
            self._workers[index].kill()
            worker = self._hire(index)
            failure = self._hear(worker, deadline(self._settings, starting=True), starting=True)
            if failure is None and row is not None:
                worker.send(STEP + bytes([row.turn]))
                failure = self._hear(worker, deadline(self._settings))
                row.set_reset(index)

    # The timeline.

    def start(self, row: Row) -> None:
        """Start every environment anew; the row holds their first frames."""
        for index, worker in enumerate(self._workers):
            self.cut(index)
            worker.send(STEP + bytes([row.turn]))
        self._answers(row)

    def launch(self, action: NDArray[Any], row: Row) -> None:
        """Begin a step [N, …] whose outcome this row will hold."""
        self._shared.actions[...] = action
        message = STEP + bytes([row.turn])
        for worker in self._workers:
            worker.send(message)

    def collect(self, row: Row) -> None:
        """Wait until every process has filled its part of the row."""
        self._answers(row)

    def repair(self, env: int, error: NonFiniteError, row: Row) -> None:
        """Replace an environment whose numbers are no numbers; its row becomes a reset."""
        self._replace(env, error, row)

    # Saved state.

    def snapshot(self) -> dict[str, Any]:
        """Return the plain state: seeds and episodes, which their actions lead to again."""
        episode, over = self._shared.progress.T
        known = {"episode": episode.tolist(), "over": (over > 0).tolist()}
        return {"made_by": "single", "seed": self._seed, **known}

    def restore(
        self, saved: dict[str, Any], past: list[NDArray[Any] | None], row: Row
    ) -> NDArray[np.bool_]:
        """Play the episodes under way again; return whose goes on [N]."""
        self._seed = Saved(saved, "backend").whole("seed", 0, LARGEST_SEED)
        progress = progress_in(saved, len(past))
        able = np.array([actions is not None for actions in past])
        for env in np.flatnonzero(able).tolist():
            self._begin_after(env, int(progress[env, 0]) - 1)
        turn = bytes([row.turn])
        self._ask([STEP + turn for _ in past], able)
        dtype = self._shared.actions.dtype
        known = [np.empty(0) if actions is None else actions for actions in past]
        for first in range(0, max(map(len, known)), REPLAY_ACTIONS):
            parts = [p[first : first + REPLAY_ACTIONS].astype(dtype).tobytes() for p in known]
            self._ask([REPLAY + turn + part if part else b"" for part in parts], able)
        able &= (self._shared.progress == progress).all(axis=1)
        for env in np.flatnonzero(~able).tolist():
            self._shared.progress[env] = progress[env]
            self.cut(env)
        return able

    def _ask(self, messages: list[bytes], able: NDArray[np.bool_]) -> None:
        """Send each able worker its message, if it has one; who breaks is able no more."""
        asked = [env for env, message in enumerate(messages) if message and able[env]]
        for env in asked:
            self._workers[env].send(messages[env])
        late = deadline(self._settings)
        for env in asked:
            failure = self._hear(self._workers[env], late)
            if failure is not None:
                able[env] = False
                self._replace(env, failure)

    def cut(self, env: int) -> None:
        """Let the next row of an environment be a reset."""
        self._begin_after(env, int(self._shared.progress[env, 0]))
        self._shared.progress[env, 1] = True

    def _begin_after(self, env: int, episode: int) -> None:
        self._workers[env].send(CUT + json.dumps([self._seed, episode]).encode())
