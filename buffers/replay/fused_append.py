"""Append timesteps to the host replay from compiled code (fused rollouts)."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from steadyrl.buffers.memory_layout import IS_TERMINATED, IS_TRUNCATED, IS_VALID
from steadyrl.buffers.replay.timeline import close_timestep
from steadyrl.core.jit import jit

# Entries of `Ring.counters`: the pending timestep, the number of sampleable transitions, and the
# error code of `close_timestep` (0: none).
PENDING, NUM_SAMPLEABLE, ERROR, COUNTERS = range(4)


class Ring(NamedTuple):
    """Arrays of a replay that compiled code appends to; the tree's are empty without priorities."""

    flags: NDArray[Any]  # [R, N], R timesteps in the ring
    sampleable: NDArray[Any]  # [N, span]
    cursors: NDArray[Any]  # [3, N]
    added: NDArray[Any]
    evicted: NDArray[Any]
    step_flags: NDArray[Any]  # [3, N]
    reach: int
    frames: NDArray[Any]  # [R · N, F]
    action: NDArray[Any]  # [R, N]
    reward: NDArray[Any]  # [R, N]
    nodes: NDArray[Any]
    minima: NDArray[Any]
    offsets: NDArray[Any]
    initial_priority: NDArray[Any]  # [1] float64, p^α of new transitions
    counters: NDArray[Any]  # [COUNTERS] int64


@jit
def append_timestep(ring: Ring, outcome: Any, action: Any, obs: Any, clip: bool) -> None:
    """Store actions [N, 1] with their outcome, and the newest frame of each obs [N, stack · F]."""
    ring_size, envs = ring.flags.shape
    for env in range(envs):
        ring.step_flags[IS_TERMINATED, env] = outcome.terminated[env]
        ring.step_flags[IS_TRUNCATED, env] = outcome.truncated[env]
        ring.step_flags[IS_VALID, env] = outcome.valid[env]
    pending = ring.counters[PENDING]
    num_added, num_evicted = close_timestep(
        ring.flags,
        ring.sampleable,
        ring.cursors,
        ring.added,
        ring.evicted,
        ring.step_flags,
        pending,
        ring.reach,
        ring.nodes,
        ring.minima,
        ring.offsets,
        ring.initial_priority[0],
    )
    if num_added < 0:
        ring.counters[ERROR] = num_added
        return
    ring.counters[PENDING] = pending + 1
    ring.counters[NUM_SAMPLEABLE] += num_added - num_evicted
    entry, after = pending % ring_size, (pending + 1) % ring_size
    size = ring.frames.shape[1]
    older = obs.shape[1] - size
    for env in range(envs):
        reward = outcome.reward[env]
        ring.action[entry, env] = action[env, 0]
        ring.reward[entry, env] = min(max(reward, -1), 1) if clip else reward
        for i in range(size):
            ring.frames[after * envs + env, i] = obs[env, older + i]
