"""Resume on another number of ranks than the checkpoint was saved by."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from steadyrl.agents.base import Agent
from steadyrl.agents.learner.comm import Comm
from steadyrl.core.state import Stateful
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.checkpoints.archive import read_part
from steadyrl.training.checkpoints.manifest import manifest_metadata, part_names
from steadyrl.training.checkpoints.replay_blocks import METADATA, append_timesteps, saved_timesteps

log = logging.getLogger("steadyrl")


def prefix_of(rank: int) -> str:
    """Return the prefix of a rank's part names; empty for rank 0, as without ranks."""
    return f"rank{rank:04d}-" if rank else ""


def parts_of(path: Path, prefix: str) -> list[str]:
    """List a checkpoint's parts of one rank."""
    others = re.compile(r"rank\d+-")  # not rank 0's part "ranks"
    return sorted(
        name
        for name in part_names(path)
        if (name.startswith(prefix) if prefix else not others.match(name))
    )


def saved_ranks(path: Path) -> int:
    """Return the number of ranks that wrote a checkpoint."""
    ranks: int = manifest_metadata(path).get("ranks", 1)
    return ranks


def reshard(
    path: Path, before: int, comm: Comm, run: Stateful, env: VectorEnv, agent: Agent
) -> None:
    """Load what is valid for another number of ranks; warn about the rest.

    Shared state is kept: weights, optimiser, normalisers, counters. Ranks that existed keep their
    environments and generators; new ranks start with fresh ones.
    """
    rank, own = comm.rank, agent.state_dict()
    old = rank < before
    prefix = prefix_of(rank) if old else ""
    state = read_part(path, f"{prefix}agent")
    counts = read_part(path, f"{prefix}run")
    if not old:
        state |= {name: own[name] for name in agent.per_rank_state}
        counts["episodes"] = run.state_dict()["episodes"]
    counts["pending"] = run.state_dict()["pending"]
    agent.load_state_dict(state)
    lost = range(rank + comm.size, before, comm.size)
    agent.reshard([read_part(path, f"{prefix_of(other)}agent") for other in lost])
    run.load_state_dict(counts)
    if agent.replay is not None:
        _redistribute_replay(path, before, comm, agent)
    if old:
        env.load_state_dict(read_part(path, f"{prefix}env"))
    else:
        env.reset()
    log.warning(
        "resumed on %d rank%s (saved on %d): weights, optimiser, normalisers and counters kept; "
        "replay redistributed without priorities; partial rollout and environments of removed "
        "ranks dropped. Results will differ from an uninterrupted run.",
        comm.size,
        "" if comm.size == 1 else "s",
        before,
    )


def _redistribute_replay(path: Path, before: int, comm: Comm, agent: Agent) -> None:
    """Fill this rank's replay with the timesteps of whole old ranks, or with a part of one's."""
    assert agent.replay is not None
    if METADATA not in part_names(path):
        agent.drop_replay()
        return
    if comm.size <= before:
        parts = [(old, 0, 1) for old in range(comm.rank, before, comm.size)]
    else:
        old = comm.rank % before
        parts = [(old, comm.rank // before, len(range(old, comm.size, before)))]
    for old, part, count in parts:
        append_timesteps(agent.replay, saved_timesteps(path, prefix_of(old), part, count))
