"""Adding rows to a replay on the host from compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from steadyrl.buffers.replay.index import IS_TERMINATED, IS_TRUNCATED, IS_VALID, close_row
from steadyrl.core.jit import compiled

# Of the places: the pending row, how many transitions can be drawn, and, where rows contradict one
# another, what `close_row` says of it.
PENDING, SAMPLEABLE, WRONG, PLACES = range(4)


class Ring(NamedTuple):
    """The arrays of a replay; without priorities those of the tree are empty."""

    flags: NDArray[Any]  # [rows, N]
    alive: NDArray[Any]  # [N, span]
    cursors: NDArray[Any]  # [3, N]
    born: NDArray[Any]
    dead: NDArray[Any]
    given: NDArray[Any]  # [3, N]
    n_step: int
    frames: NDArray[Any]  # [rows · N, F]
    action: NDArray[Any]  # [rows, N]
    reward: NDArray[Any]  # [rows, N]
    nodes: NDArray[Any]
    minima: NDArray[Any]
    offsets: NDArray[Any]
    newcomers: NDArray[Any]  # [1] float64: what transitions start with, in the tree
    places: NDArray[Any]  # [PLACES] int64


@compiled
def add_row(ring: Ring, row: Any, action: Any, obs: Any, clip: bool) -> None:
    """Store what actions [N, 1] led to, and the newest frames of obs [N, stack · F]."""
    rows, envs = ring.flags.shape
    for env in range(envs):
        ring.given[IS_TERMINATED, env] = row.terminated[env]
        ring.given[IS_TRUNCATED, env] = row.truncated[env]
        ring.given[IS_VALID, env] = row.valid[env]
    pending = ring.places[PENDING]
    births, deaths = close_row(
        ring.flags,
        ring.alive,
        ring.cursors,
        ring.born,
        ring.dead,
        ring.given,
        pending,
        ring.n_step,
        ring.nodes,
        ring.minima,
        ring.offsets,
        ring.newcomers[0],
    )
    if births < 0:
        ring.places[WRONG] = births
        return
    ring.places[PENDING] = pending + 1
    ring.places[SAMPLEABLE] += births - deaths
    slot, after = pending % rows, (pending + 1) % rows
    size = ring.frames.shape[1]
    older = obs.shape[1] - size
    for env in range(envs):
        reward = row.reward[env]
        ring.action[slot, env] = action[env, 0]
        ring.reward[slot, env] = min(max(reward, -1), 1) if clip else reward
        for i in range(size):
            ring.frames[after * envs + env, i] = obs[env, older + i]
