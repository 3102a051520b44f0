"""N environments in N worker processes, which can time out, be killed and be replaced."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from ctypes import c_uint8
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.errors import ExpectedError, MemoryBudgetError, NonFiniteError
from steadyrl.core.saved_state import LARGEST_SEED, Saved
from steadyrl.envs.backends.single_env import WarnOnce
from steadyrl.envs.backends.worker import CHECK, FORCE_RESET, REPLAY, STEP, WorkerConfig
from steadyrl.envs.backends.worker_handle import (
    CLOSE_SECONDS,
    Deadline,
    Description,
    WorkerHandle,
    deadline,
    kill_all,
    no_shared_memory,
    query_subprocess,
    read_description,
    signals_blocked,
    validate_shared_memory,
)
from steadyrl.envs.encoding.step_buffer import SharedStepBuffers, StepBuffer, load_progress
from steadyrl.envs.faults import Faults, WorkerError, validate_same_spaces
from steadyrl.envs.registration import find_spec, imports_module
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.vector import Backend

log = logging.getLogger("steadyrl")
REPLAY_ACTIONS = 64  # replayed actions of a message, at most
REPLAY_PART = 8  # a message takes at most about this part of `env.step_timeout`


class ProcessBackend(Backend):
    """N environments in N processes; steps and actions are exchanged through shared memory."""

    supports_replay = True
    steps_in_background = True
    max_timeouts = 2  # a hanging process is replaced after the first

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        if not imports_module(settings.id):
            find_spec(settings.id)  # imports the provider once, before forking
        self.faults = Faults(settings.max_restarts, settings.role)
        self._settings, self._seed = settings, seed
        self._warn = WarnOnce(settings.id)
        self._workers: list[WorkerHandle] = []
        self.spec, self.limits, self._spaces, _, self._code = self._describe()
        nbytes = SharedStepBuffers.size(self.spec)
        validate_shared_memory(nbytes, settings.num_envs)
        try:
            self._memory = multiprocessing.RawArray(c_uint8, nbytes)
        except OSError as error:
            raise no_shared_memory(error) from error
        self._shared = SharedStepBuffers(self.spec, self._memory)
        self._shared.progress[:] = -1, True
        try:
            for index in range(settings.num_envs):
                self._spawn(index)
            self._recv_all()
        except BaseException:
            self.close()
            raise

    def buffers(self) -> tuple[StepBuffer, StepBuffer]:
        """Return the two step buffers in shared memory."""
        return self._shared.buffers

    def close(self) -> None:
        """End every process, by force if necessary; may be called twice and after a failure."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.quit()
        kill_all(workers, CLOSE_SECONDS)

    # Workers.

    def _describe(self) -> Description:
        """Get the spaces from a first process: this process never builds an environment."""
        while True:
            try:
                return read_description(query_subprocess(self._settings))
            except (WorkerError, MemoryBudgetError) as error:
                self.faults.handle_failure(0, error)  # raises once there were too many

    def _spawn(self, index: int) -> WorkerHandle:
        """Start a worker process and register it, atomically: else a signal could orphan it."""
        episode = int(self._shared.progress[index, 0])
        config = WorkerConfig(self._settings, self._seed, index, episode, self.spec, self._memory)
        with signals_blocked():
            worker = WorkerHandle(config, [other.pipe for other in self._workers])
            self._workers[index : index + 1] = [worker]
        return worker

    def _recv_all(self, out: StepBuffer | None = None) -> None:
        """Receive one reply of every worker and replace those that fail; out=None: startup replies.

        Each failure is handled before the next reply is read, so it is reported once.
        """
        within = deadline(self._settings, starting=out is None)
        for index, worker in enumerate(self._workers):
            failure = self._recv(worker, within, starting=out is None)
            if failure is not None:
                self._replace(index, failure, out)

    def _recv(
        self, worker: WorkerHandle, within: Deadline, *, starting: bool = False
    ) -> Exception | None:
        """Receive a reply: spaces at startup, else warnings to log; return the failure if any."""
        self.responses += 1
        try:
            reply = worker.recv(within)
            if starting:
                validate_same_spaces(self._spaces, read_description(reply).spaces)
            elif reply:
                for remark in reply.decode().split("\n"):
                    self._warn(remark)
        except (WorkerError, ExpectedError) as error:
            return error
        return None

    def _replace(self, index: int, error: Exception, out: StepBuffer | None = None) -> None:
        """Replace a failed worker by a new process; with `out`, also start an episode."""
        failure: Exception | None = error
        while failure is not None:
            self.faults.handle_failure(index, failure)
            worker, failure = self._respawn(index)
            if failure is None and out is not None:
                worker.send(STEP + bytes([out.slot]))
                failure = self._recv(worker, deadline(self._settings))
                out.set_reset(index)

    def _respawn(self, index: int) -> tuple[WorkerHandle, Exception | None]:
        """Start a new process for an environment; return it, and its failure, if any."""
        self._workers[index].kill()
        worker = self._spawn(index)
        return worker, self._recv(worker, deadline(self._settings, starting=True), starting=True)

    # Stepping.

    def start(self, out: StepBuffer) -> None:
        """Reset every environment and write the first frames into `out`."""
        for index, worker in enumerate(self._workers):
            self.force_reset(index)
            worker.send(STEP + bytes([out.slot]))
        self._recv_all(out)

    def step_async(self, action: NDArray[Any], out: StepBuffer) -> None:
        """Start a step with actions [N, …]; its outcome goes into `out`."""
        self._shared.actions[...] = action
        message = STEP + bytes([out.slot])
        for worker in self._workers:
            worker.send(message)

    def step_wait(self, out: StepBuffer) -> None:
        """Wait until every process has filled its part of `out`."""
        self._recv_all(out)

    def check_next_step(self) -> None:
        """Check environment 0's next step against Gymnasium's API, and warn."""
        self._workers[0].send(CHECK)

    def handle_non_finite(self, env: int, error: NonFiniteError, out: StepBuffer) -> None:
        """Replace an environment that returned NaN or infinity; its step becomes a reset."""
        error.user_frames = tuple(self._code["step" if out.valid[env] else "reset"])
        self._replace(env, error, out)

    # Saved state.

    def snapshot(self) -> dict[str, Any]:
        """Return seeds and episode numbers; replaying the actions restores the rest."""
        episode, over = self._shared.progress.T
        known = {"episode": episode.tolist(), "needs_reset": (over > 0).tolist()}
        return {"backend_kind": "single", "seed": self._seed, **known}

    def restore(
        self, saved: dict[str, Any], past_actions: list[NDArray[Any] | None], out: StepBuffer
    ) -> NDArray[np.bool_]:
        """Replay the running episodes; return which of them continue [N]."""
        self._seed = Saved(saved, "backend").whole("seed", 0, LARGEST_SEED)
        progress = load_progress(saved, len(past_actions))
        replayed = np.array([actions is not None for actions in past_actions])
        for env in np.flatnonzero(replayed).tolist():
            self._begin_after(env, int(progress[env, 0]) - 1)
        slot = bytes([out.slot])
        self._request([STEP + slot for _ in past_actions], replayed)
        dtype = self._shared.actions.dtype
        known = [np.empty(0) if actions is None else actions for actions in past_actions]
        first, size = 0, 1
        while first < max(map(len, known)):
            parts = [p[first : first + size].astype(dtype).tobytes() for p in known]
            begin = time.monotonic()
            self._request([REPLAY + slot + part if part else b"" for part in parts], replayed)
            first += size
            fast = REPLAY_PART * (time.monotonic() - begin) < self._settings.step_timeout
            size = min(2 * size, REPLAY_ACTIONS) if fast else max(size // 2, 1)
        replayed &= (self._shared.progress == progress).all(axis=1)
        for env in np.flatnonzero(~replayed).tolist():
            self._shared.progress[env] = progress[env]
            self.force_reset(env)
        return replayed

    def _request(self, messages: list[bytes], replayed: NDArray[np.bool_]) -> None:
        """Send messages to workers still replaying; one that fails is respawned and left out."""
        asked = [env for env, message in enumerate(messages) if message and replayed[env]]
        for env in asked:
            self._workers[env].send(messages[env])
        within = deadline(self._settings)
        for env in asked:
            failure = self._recv(self._workers[env], within)
            if failure is not None:
                replayed[env] = False
                self._give_up_replay(env, failure)

    def _give_up_replay(self, env: int, failure: Exception) -> None:
        """Respawn a worker that could not replay its episode; only running out of memory counts."""
        if isinstance(failure, MemoryBudgetError):
            self._replace(env, failure)
            return
        log.warning("environment %d could not be replayed", env, exc_info=failure)
        _, again = self._respawn(env)
        if again is not None:
            self._replace(env, again)

    def force_reset(self, env: int) -> None:
        """Make the next step of an environment a reset."""
        self._begin_after(env, int(self._shared.progress[env, 0]))
        self._shared.progress[env, 1] = True

    def _begin_after(self, env: int, episode: int) -> None:
        self._workers[env].send(FORCE_RESET + json.dumps([self._seed, episode]).encode())
