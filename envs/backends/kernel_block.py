"""Fused rollouts: compiled code steps a kernel many times, including `VectorEnv`'s bookkeeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.core.jit import address_of, box, call, jit, keeps_machine_code
from steadyrl.envs.backends.kernel import KernelBackend
from steadyrl.envs.kernels.state import Outcome, Simulation
from steadyrl.envs.types import (
    NON_FINITE,
    OBS_SLOT,
    STEP_SLOT,
    STOP,
    BlockResult,
    Episode,
    StepMany,
)
from steadyrl.envs.vector import VectorEnv

# Further entries of the counters, after those in `envs/types.py`.
TIMESTEPS, TIMESTEPS_LEFT, STEPS, STEPS_LEFT, EPISODES, COUNTERS = range(
    NON_FINITE + 1, NON_FINITE + 7
)
AT_STEP, ENV, RETURN, LENGTH = range(4)  # columns of `BlockContext.episodes`

MAX_SECONDS = 0.02  # target duration of a block: signals and checkpoints wait for its end
FIRST_BLOCK = 64  # timesteps of the first block, before any was timed


class BlockContext(NamedTuple):
    """Arguments of `advance`, boxed for compiled code."""

    step: int  # address of the kernel's machine code
    sim: Simulation
    action: NDArray[Any]  # [N, …] input of the kernel
    flat_action: NDArray[Any]  # [N, A] the same memory; the policy writes its actions here
    outcomes: tuple[Outcome, Outcome]  # filled alternately
    observations: tuple[NDArray[Any], NDArray[Any]]  # [N, D] stacked ones, filled alternately
    frame_size: int  # elements of one frame
    returns: NDArray[np.float64]  # [N] of running episodes
    episode_begin: NDArray[np.int64]  # [N] timesteps before they began
    episodes: NDArray[np.float64]  # [M, 4] finished episodes
    counters: NDArray[np.int64]


@jit
def advance(context: BlockContext) -> None:
    """Step the kernel with the current actions; update observations, statistics and counters."""
    counters, returns = context.counters, context.returns
    counters[STEP_SLOT] = 1 - counters[STEP_SLOT]
    outcome = context.outcomes[counters[STEP_SLOT]]
    call(context.step, (context.sim, context.action, outcome))
    frames = outcome.obs.reshape(len(returns), -1)
    if not (_finite(outcome.reward) and _finite(outcome.obs.reshape(-1))):
        counters[STOP] = counters[NON_FINITE] = 1
        return
    before = context.observations[counters[OBS_SLOT]]
    counters[OBS_SLOT] = 1 - counters[OBS_SLOT]
    if before.shape[1] > context.frame_size:
        _push(before, frames, outcome.valid, context.observations[counters[OBS_SLOT]])
    counters[TIMESTEPS] += 1
    counters[TIMESTEPS_LEFT] -= 1
    for env in range(len(returns)):
        if outcome.valid[env]:
            counters[STEPS] += 1
            counters[STEPS_LEFT] -= 1
    for env in range(len(returns)):
        returns[env] += outcome.reward[env]
        if not outcome.valid[env]:
            returns[env] = 0.0
            context.episode_begin[env] = counters[TIMESTEPS]
        if outcome.terminated[env] or outcome.truncated[env]:
            ended = context.episodes[counters[EPISODES]]
            ended[AT_STEP], ended[ENV], ended[RETURN] = counters[STEPS], env, returns[env]
            ended[LENGTH] = counters[TIMESTEPS] - context.episode_begin[env]
            counters[EPISODES] += 1
            returns[env] = 0.0
            context.episode_begin[env] = counters[TIMESTEPS]
    full = counters[EPISODES] + len(returns) > len(context.episodes)
    counters[STOP] = full or counters[TIMESTEPS_LEFT] <= 0 or counters[STEPS_LEFT] <= 0


@jit
def _finite(numbers: Any) -> bool:
    """Return whether numbers [F] are finite: x - x is 0 for finite x, NaN otherwise."""
    total = numbers.dtype.type(0)
    for number in numbers:
        total += abs(number - number)
    finite: bool = total == 0
    return finite


@jit
def _push(before: Any, frames: Any, valid: Any, stack: Any) -> None:
    size, frame = stack.shape[1], frames.shape[1]
    for env in range(len(frames)):
        for i in range(size - frame):
            stack[env, i] = before[env, i + frame] if valid[env] else frames[env, i % frame]
        for i in range(frame):
            stack[env, size - frame + i] = frames[env, i]


class KernelVectorEnv(VectorEnv):
    """Vector environment of kernels that supports `step_many`."""

    def __init__(
        self, backend: KernelBackend, *, frame_stack: int, check_pixel_range: bool
    ) -> None:
        super().__init__(backend, frame_stack=frame_stack, check_pixel_range=check_pixel_range)
        n = self.spec.num_envs
        self._kernel = backend
        observations = (
            [buffer.obs for buffer in self._buffers] if self._stack is None else self._stack.stacks
        )
        self._observations: Any = tuple(array.reshape(n, -1) for array in observations)
        self._counters = np.zeros(COUNTERS, np.int64)
        self._ended = np.zeros((max(64, 2 * n), 4))
        self._max_timesteps = FIRST_BLOCK
        # Compiling takes longer than one run gains from it: only where later runs find the code.
        self._can_fuse = keeps_machine_code(advance) and bool(backend.address())
        self._advance = 0  # the address of `advance`
        self._boxed_context: Any = None
        self._boxed_sim: Any = None  # the simulation it was built for

    @property
    @override
    def runs_blocks(self) -> bool:
        return self._can_fuse

    @property
    @override
    def step_many(self) -> StepMany | None:
        return self._step_many if self._can_fuse and self._awaiting_receive else None

    def _step_many(self, function: Callable[..., None], steps: int, arguments: Any) -> BlockResult:
        if self._boxed_sim is not self._kernel.sim:
            self._build_context()
        before, stack = self._statistics.timesteps, self._stack
        observations = self._slot if stack is None else stack.slot
        counters = self._counters
        counters[:] = 0
        counters[OBS_SLOT], counters[STEP_SLOT] = observations, self._slot
        counters[TIMESTEPS], counters[TIMESTEPS_LEFT] = before, self._max_timesteps
        counters[STEPS_LEFT] = steps
        begun = time.perf_counter()
        try:
            function(self._advance, self._boxed_context, arguments)
        except BaseException as error:
            self._sync_from_block(before)
            self._faults.give_up(self.spec.id, error)
        timesteps, block = self._sync_from_block(before)
        self._faults.ahead = 0  # the run counts them
        seconds = (time.perf_counter() - begun) / max(1, timesteps)
        fitting = int(MAX_SECONDS / max(seconds, 1e-9))
        self._max_timesteps = max(1, min(2 * self._max_timesteps, fitting))
        return block

    def _sync_from_block(self, before: int) -> tuple[int, BlockResult]:
        """Update this object after a block; return its number of timesteps, and its result."""
        observations, self._slot, _, broken, timesteps, _, steps, _, episodes = (
            self._counters.tolist()
        )
        self._awaiting_receive = False
        if self._stack is not None:
            self._stack.slot = observations
        self._statistics.timesteps = timesteps
        self._statistics.close_episodes(self._ended[:episodes, RETURN].tolist())
        self._faults.step += timesteps - before
        self._faults.ahead = steps
        if broken:
            self._handle_non_finite(self._buffers[self._slot])
        self._check_pixels(self._buffers[self._slot], timesteps - before)
        ended = self._ended[:episodes].tolist() if episodes else ()
        found = tuple((int(at), Episode(int(env), score, int(n))) for at, env, score, n in ended)
        return timesteps - before, BlockResult(steps, found)

    def _build_context(self) -> None:
        kernel = self._kernel
        returns, begin = self._statistics.running
        context = BlockContext(
            kernel.address(),
            kernel.sim,
            kernel.action,
            kernel.action.reshape(len(kernel.action), -1),
            kernel.outcomes,
            self._observations,
            self._buffers[0].obs[0].size,
            returns,
            begin,
            self._ended,
            self._counters,
        )
        self._advance = address_of(advance, context) or 0
        self._boxed_context, self._boxed_sim = box(context), kernel.sim
