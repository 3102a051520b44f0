"""N environments on one timeline, whatever runs them (autoreset on the step after an end)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.core.errors import NonFiniteError
from steadyrl.core.saved import Saved, length
from steadyrl.core.state import Stateful, give
from steadyrl.envs.encoding.action_log import ActionLog
from steadyrl.envs.encoding.frame_stack import FrameStack
from steadyrl.envs.encoding.statistics import EpisodeStatistics
from steadyrl.envs.encoding.step_buffer import Row, action_form
from steadyrl.envs.encoding.used_levels import UsedLevels
from steadyrl.envs.faults import Faults
from steadyrl.envs.row_clock import RowClock
from steadyrl.envs.types import EnvSpec, RunRows, Step

log = logging.getLogger("steadyrl")

WHOLE = ("uint8", "int8", "int16", "int32", "int64")  # types that discrete actions come in


class Backend(ABC):
    """What runs N environments; it fills rows and knows nothing else of the timeline."""

    spec: EnvSpec  # of single frames
    faults: Faults
    limits: tuple[float, float] | None = None  # as `Encoder.limits`
    replays = False  # episodes have seeds of their own, so that their actions lead to them again
    works_alone = False  # a step goes on from its launch, whatever this process does meanwhile
    # Environments that have answered so far, and how many step timeouts the next may take.
    answers, timeouts = 0, 1

    def rows(self) -> tuple[Row, Row]:
        """Return the two rows that are filled in turn."""
        return Row(self.spec, 0), Row(self.spec, 1)

    @abstractmethod
    def start(self, row: Row) -> None:
        """Start every environment anew; the row holds their first frames."""

    @abstractmethod
    def launch(self, action: NDArray[Any], row: Row) -> None:
        """Begin a step [N, …] whose outcome this row will hold."""

    @abstractmethod
    def collect(self, row: Row) -> None:
        """Finish the step begun last and fill the row."""

    def repair(self, env: int, error: NonFiniteError, row: Row) -> None:
        """Replace an environment whose numbers are no numbers; its row becomes a reset."""
        raise error

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return the plain state of the environments between two steps."""

    @abstractmethod
    def restore(
        self, saved: dict[str, Any], past: list[NDArray[Any] | None], row: Row
    ) -> NDArray[np.bool_]:
        """Put a snapshot back; return whose episode goes on [N], the others' next row is a reset.

        `past` holds the actions of the episodes under way, the row the frames of that moment, which
        those that replay overwrite with what they came to.
        """

    @abstractmethod
    def cut(self, env: int) -> None:
        """Let the next row of an environment be a reset."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; safe to call twice and after a failure."""


class VectorEnv(Stateful):
    """N environments whose rows alternate between two preallocated sets of arrays."""

    def __init__(
        self, backend: Backend, *, frame_stack: int = 1, check_levels: bool = False
    ) -> None:
        num_envs = backend.spec.num_envs
        self.spec = replace(backend.spec, frame_stack=frame_stack)
        self._backend = backend
        self._faults = backend.faults
        self._rows = backend.rows()
        self._turn = 0
        self._stack = FrameStack(self.spec) if frame_stack > 1 else None
        self._statistics = EpisodeStatistics(num_envs, self.spec.info_metrics)
        self._actions = ActionLog(num_envs) if backend.replays else None
        self._levels: UsedLevels | None = None
        if check_levels and backend.limits is not None:
            self._levels = UsedLevels(self.spec, backend.limits)
        self._started = self._under_way = False
        self.clock = RowClock()

    @property
    def answers(self) -> int:
        """How many environments have answered so far: it grows within a row, unless one hangs."""
        return self._backend.answers

    @property
    def timeouts(self) -> int:
        """How many times `env.step_timeout` it may take until the next one answers."""
        return self._backend.timeouts

    @property
    def observation(self) -> NDArray[Any]:
        """The current observations [N, …], which the next action is decided on."""
        return self._rows[self._turn].obs if self._stack is None else self._stack.now

    @property
    def started(self) -> bool:
        """Whether there are episodes under way."""
        return self._started

    @property
    def starts(self) -> NDArray[np.bool_]:
        """Whose next action is the first of an episode [N]."""
        return ~self._rows[self._turn].valid

    def reset(self) -> NDArray[Any]:
        """Start every environment anew and return the first observations [N, …]."""
        row = self._next()
        with self.clock:
            self._backend.start(row)
        self._repair(row)
        row.set_all_reset()
        self._statistics.clear()
        if self._actions is not None:
            self._actions.clear()
        self._started, self._under_way = True, False
        return row.obs if self._stack is None else self._stack.push(row.obs, row.valid)

    def send(self, action: NDArray[Any]) -> None:
        """Hand one action per environment over; rows that reset ignore theirs."""
        if self._under_way or not self._started:
            raise RuntimeError("send() needs a reset() before it and one receive() after it")
        self._under_way = True
        if self._backend.works_alone:
            self.clock.begin()
        self._backend.launch(action, self._rows[1 - self._turn])
        if self._actions is not None:
            self._note_starts(self._actions)
            self._actions.append(action)

    def receive(self) -> Step:
        """Return the row that the last `send` led to."""
        if not self._under_way:
            raise RuntimeError("receive() needs a send() before it")
        self._under_way = False
        row = self._next()
        with self.clock:
            self._backend.collect(row)
        if not row.is_finite():
            self._repair(row)
        self._faults.step += 1
        self._look(row)
        episodes = self._statistics.record(row)
        obs = row.obs if self._stack is None else self._stack.push(row.obs, row.valid)
        return Step(obs, row.reward, row.terminated, row.truncated, row.valid, episodes)

    @property
    def runs_blocks(self) -> bool:
        """Whether `run` lets compiled code take steps, once actions are sent."""
        return False

    @property
    def run(self) -> RunRows | None:
        """What lets compiled code make rows, first with the actions sent; None where it cannot.

        It is given a function, the number of valid steps to end after, and `Held(arguments)`, and
        calls `function(advance, held stage, held arguments)` (`envs/backends/kernel_block.py`),
        which calls `advance` for each row until that says that it is over: then, or after some
        milliseconds.
        """
        return None

    @property
    def under_way(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """What the episodes under way have come to: returns and lengths [N]."""
        returns, begin = self._statistics.under_way
        return returns.copy(), self._statistics.rows - begin

    def step(self, action: NDArray[Any]) -> Step:
        """Send and receive."""
        self.send(action)
        return self.receive()

    def _next(self) -> Row:
        self._turn = 1 - self._turn
        return self._rows[self._turn]

    def _repair(self, row: Row) -> None:
        while not row.is_finite():
            name, env, number = row.not_finite()
            self._backend.repair(env, self._faults.not_finite(name, env, number), row)

    def _look(self, row: Row, rows: int = 1) -> None:
        """Look at the levels of the first images."""
        if self._levels is not None and self._levels.look(row.obs, rows):
            self._levels = None

    def _note_starts(self, actions: ActionLog) -> None:
        valid = self._rows[self._turn].valid
        if np.count_nonzero(valid) < valid.size:
            for env in np.flatnonzero(~valid).tolist():
                actions.begin_episode(env)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._under_way:
            raise RuntimeError("the state is whole between receive() and send() only")
        row = self._rows[self._turn]
        parts: dict[str, Any] = {
            "step": self._faults.step,
            "started": self._started,
            "valid": row.valid,
            "frames": row.obs,
            "stack": None if self._stack is None else self._stack.now,
            "actions": self._past(),
            "statistics": self._statistics,
            "backend": self._backend.snapshot(),
        }
        given: dict[str, Any] = give(parts)
        return given

    def _past(self) -> dict[str, NDArray[Any]]:
        """Return the actions of the episodes under way, of those environments that know them."""
        if self._actions is None or not self._started:
            return {}
        self._note_starts(self._actions)
        known = ((env, self._actions.episode(env)) for env in range(self.spec.num_envs))
        return {str(env): actions for env, actions in known if actions is not None}

    @override
    def load_state_dict(self, state: Any) -> None:
        given, num_envs = Saved(state, "env"), self.spec.num_envs
        theirs = given.raw("frames")
        if length(theirs) not in (0, num_envs):
            raise ValueError(f"the state is of {length(theirs)} environments, there are {num_envs}")
        row = self._rows[1 - self._turn]
        dtype = self.spec.dtype
        saved = given.tensor("frames", row.obs.shape, dtype).numpy()
        valid = given.tensor("valid", (num_envs,), "bool").numpy()
        past = [self._past_in(given, env) for env in range(num_envs)]
        step, started = given.whole("step"), given.boolean("started")
        stack = None if self._stack is None else self._stack_in(given, saved)
        self._statistics.load_state_dict(given.raw("statistics"))
        if self._statistics.rows != step:
            raise ValueError(f"env.step: is {step}, its statistics have {self._statistics.rows}")
        self._faults.step, self._started, self._under_way = step, started, False
        self._turn = row.turn
        row.obs[...] = saved
        backend = given.raw("backend")
        self._go_on(self._backend.restore(backend, past, row), past, saved)
        row.set_all_reset()
        row.valid[:] = valid
        row.obs[...] = saved
        if self._stack is not None:
            self._stack.now[...] = stack

    def _stack_in(self, given: Saved, frames: NDArray[Any]) -> NDArray[Any]:
        """Return the saved stacks [N, k·C, …], which end with the saved frames."""
        shape, dtype = (len(frames), *self.spec.observation_shape), self.spec.dtype
        stack: NDArray[Any] = given.tensor("stack", shape, dtype).numpy()
        if given.boolean("started") and not (stack[:, -frames.shape[1] :] == frames).all():
            raise ValueError("env.stack: does not end with env.frames")
        return stack

    def _past_in(self, given: Saved, env: int) -> NDArray[Any] | None:
        """Return the actions of an environment's episode under way, where they are known."""
        actions = given.inside("actions")
        if str(env) not in actions:
            return None
        dtype, shape = action_form(self.spec.action)
        raw = actions.raw(str(env))
        count = length(raw)
        if not count and hasattr(raw, "numpy"):
            return np.zeros((0, *shape), dtype)  # of an episode that begins: as yet of no shape
        sent = str(getattr(raw, "dtype", "")).removeprefix("torch.")
        if dtype.kind == "i" and sent in WHOLE:  # kept as whoever acted had them
            dtype = np.dtype(sent)
        found: NDArray[Any] = actions.tensor(str(env), (count, *shape), dtype.name).numpy()
        return found

    def _go_on(
        self, able: NDArray[np.bool_], past: list[NDArray[Any] | None], saved: NDArray[Any]
    ) -> None:
        """Cut the episodes that replaying did not bring back to the saved frames [N, …]."""
        frames = self._rows[self._turn].obs
        same = (frames == saved).reshape(len(saved), -1).all(axis=1)
        for env in np.flatnonzero(able & ~same).tolist():
            self._backend.cut(env)
        lost = np.flatnonzero(~(able & same)).tolist()
        if self._actions is not None:
            self._actions.load([None if env in lost else past[env] for env in range(len(past))])
        if lost and self._started:
            who = "all environments"
            if len(lost) < len(past):
                who = f"environment {', '.join(map(str, lost))}"
            log.warning("episodes of %s cannot be continued: the next row starts new ones", who)

    def close(self) -> None:
        """Free everything; safe to call twice and after a failure."""
        with self.clock:
            self._backend.close()

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
