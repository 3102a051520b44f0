"""Rows of a kernel made by compiled code, with the bookkeeping that `VectorEnv` does of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.core.jit import Held, address_of, call, compiled, is_kept
from steadyrl.envs.backends.kernel import KernelBackend
from steadyrl.envs.kernels.state import Outcome, Simulation
from steadyrl.envs.types import BROKEN, OVER, ROW, SEEN, Episode, Rows, RunRows
from steadyrl.envs.vector import VectorEnv

# Of the counters, after those that agents know.
ROWS, LEFT_ROWS, STEPS, LEFT_STEPS, EPISODES, COUNTERS = range(BROKEN + 1, BROKEN + 7)
AT, ENV, RETURN, LENGTH = range(4)  # columns of the episodes that ended

LONGEST = 0.02  # seconds of a stretch, about: signals, saves and watchers wait for its end
FIRST_ROWS = 64  # of a stretch, before any was timed


class Stage(NamedTuple):
    """What compiled code needs to make the next row of the timeline."""

    step: int  # address of the kernel
    sim: Simulation
    action: NDArray[Any]  # [N, …] what the kernel reads
    sent: NDArray[Any]  # [N, A] the same, for who decides
    rows: tuple[Outcome, Outcome]  # filled in turn
    seen: tuple[NDArray[Any], NDArray[Any]]  # [N, D] what is decided on, in turn
    frame: int  # numbers of the newest frame in it
    returns: NDArray[np.float64]  # [N] of the episodes under way
    begin: NDArray[np.int64]  # [N] rows before them
    episodes: NDArray[np.float64]  # [M, 4] that ended
    counters: NDArray[np.int64]


@compiled
def advance(stage: Stage) -> None:
    """Make a row with the actions that were sent, look at it, and count it."""
    counters, returns = stage.counters, stage.returns
    counters[ROW] = 1 - counters[ROW]
    row = stage.rows[counters[ROW]]
    call(stage.step, (stage.sim, stage.action, row))
    frames = row.obs.reshape(len(returns), -1)
    if not (_finite(row.reward) and _finite(row.obs.reshape(-1))):
        counters[OVER] = counters[BROKEN] = 1
        return
    before = stage.seen[counters[SEEN]]
    counters[SEEN] = 1 - counters[SEEN]
    if before.shape[1] > stage.frame:
        _push(before, frames, row.valid, stage.seen[counters[SEEN]])
    counters[ROWS] += 1
    counters[LEFT_ROWS] -= 1
    for env in range(len(returns)):
        if row.valid[env]:
            counters[STEPS] += 1
            counters[LEFT_STEPS] -= 1
    for env in range(len(returns)):
        returns[env] += row.reward[env]
        if not row.valid[env]:
            returns[env] = 0.0
            stage.begin[env] = counters[ROWS]
        if row.terminated[env] or row.truncated[env]:
            ended = stage.episodes[counters[EPISODES]]
            ended[AT], ended[ENV], ended[RETURN] = counters[STEPS], env, returns[env]
            ended[LENGTH] = counters[ROWS] - stage.begin[env]
            counters[EPISODES] += 1
            returns[env] = 0.0
            stage.begin[env] = counters[ROWS]
    full = counters[EPISODES] + len(returns) > len(stage.episodes)
    counters[OVER] = full or counters[LEFT_ROWS] <= 0 or counters[LEFT_STEPS] <= 0


@compiled
def _finite(numbers: Any) -> bool:
    """Tell whether numbers [F] are finite: what is not stays so when it is taken from itself."""
    total = numbers.dtype.type(0)
    for number in numbers:
        total += abs(number - number)
    finite: bool = total == 0
    return finite


@compiled
def _push(before: Any, frames: Any, valid: Any, stack: Any) -> None:
    size, frame = stack.shape[1], frames.shape[1]
    for env in range(len(frames)):
        for i in range(size - frame):
            stack[env, i] = before[env, i + frame] if valid[env] else frames[env, i % frame]
        for i in range(frame):
            stack[env, size - frame + i] = frames[env, i]


@compiled
def hold(stage: Any) -> Any:
    """Hand over what rows are made on."""
    return Held(stage)


class KernelVectorEnv(VectorEnv):
    """Kernels whose rows other compiled code may make many at a time."""

    def __init__(
        self, backend: KernelBackend, *, frame_stack: int = 1, check_levels: bool = False
    ) -> None:
        super().__init__(backend, frame_stack=frame_stack, check_levels=check_levels)
        n = self.spec.num_envs
        self._kernel = backend
        seen = [row.obs for row in self._rows] if self._stack is None else self._stack.stacks
        self._seen: Any = tuple(array.reshape(n, -1) for array in seen)
        self._counters = np.zeros(COUNTERS, np.int64)
        self._ended = np.zeros((max(64, 2 * n), 4))
        self._most = FIRST_ROWS
        # Compiling takes longer than most runs gain by it: only what is kept is compiled.
        self._able = is_kept(advance) and bool(backend.address())
        self._advance = 0  # the address of `advance`
        self._held: Any = None  # the stage
        self._held_sim: Any = None  # what it is a stage for

    @property
    @override
    def runs_blocks(self) -> bool:
        return self._able

    @property
    @override
    def run(self) -> RunRows | None:
        return self._run if self._able and self._under_way else None

    def _run(self, function: Callable[..., None], steps: int, arguments: Any) -> Rows:
        if self._held_sim is not self._kernel.sim:
            self._build_stage()
        before, stack = self._statistics.rows, self._stack
        seen = self._turn if stack is None else stack.turn
        self._counters[:] = (seen, self._turn, 0, 0, before, self._most, 0, steps, 0)
        begun = time.perf_counter()
        try:
            function(self._advance, self._held, arguments)
        except BaseException as error:
            self._take_over(before)
            self._faults.give_up(self.spec.id, error)
        made, rows = self._take_over(before)
        seconds = (time.perf_counter() - begun) / max(1, made)
        self._most = max(1, min(2 * self._most, int(LONGEST / max(seconds, 1e-9))))
        return rows

    def _take_over(self, before: int) -> tuple[int, Rows]:
        """Go on where compiled code stopped; return how many rows it made, and their sum."""
        seen, self._turn, _, broken, rows, _, steps, _, episodes = self._counters.tolist()
        self._under_way = False
        if self._stack is not None:
            self._stack.turn = seen
        self._statistics.rows = rows
        self._faults.step += rows - before
        if broken:
            self._repair(self._rows[self._turn])
        self._look(self._rows[self._turn], rows - before)
        ended = self._ended[:episodes].tolist() if episodes else ()
        found = tuple((int(at), Episode(int(env), score, int(n))) for at, env, score, n in ended)
        return rows - before, Rows(steps, found)

    def _build_stage(self) -> None:
        kernel = self._kernel
        returns, begin = self._statistics.under_way
        stage = Stage(
            kernel.address(),
            kernel.sim,
            kernel.action,
            kernel.action.reshape(len(kernel.action), -1),
            kernel.outcomes,
            self._seen,
            self._rows[0].obs[0].size,
            returns,
            begin,
            self._ended,
            self._counters,
        )
        self._advance = address_of(advance, stage) or 0
        self._held, self._held_sim = hold(stage), kernel.sim
