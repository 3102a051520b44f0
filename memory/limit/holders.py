"""Who holds memory and what grew, in words, for the lines about the limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from steadyrl.memory.budget import enough_for, shown
from steadyrl.memory.limit.meters import Level
from steadyrl.memory.monitor import Monitor
from steadyrl.memory.process import MB, readable

THIS, OTHERS = "this process", "other programs"
_WORTH_NAMING = 4 * MB
_WORTH_LOWERING = 0.1  # of the limit: less than that cannot be enough
_HIGHER = 1.25  # times the limit: where a run that ended at it goes on


class Held(NamedTuple):
    """Bytes by holder: this process, other programs, and each worker by name.

    The limit counts `kept`, shared pages in part. Growth is that of `heaps`, which have shared
    pages in full: by `kept`, a process grows when another that shares its pages ends.
    """

    kept: Mapping[str, int]  # of this process and of other programs
    kept_by_workers: Mapping[str, int]
    heaps: Mapping[str, int]  # of all of them


class Holders:
    """Compares who holds memory now with the start of the run."""

    def __init__(
        self, monitor: Monitor, buffers: Mapping[str, int], growers: Callable[[], list[str]]
    ) -> None:
        """Start; `buffers`: bytes in host memory; `growers` names what grew in this process."""
        self._monitor, self._buffers, self._growers = monitor, buffers, growers
        self._before: Held | None = None

    def begin(self, level: Level) -> None:
        """Remember who holds memory at the start."""
        if self._before is None:
            self._before = self.read(level)

    def read(self, level: Level) -> Held:
        """Return who holds memory now; reads the process tree if `level` did not."""
        kept = level.bound.used if level.tree_is_new else self._monitor.refresh_tree()
        tree = self._monitor.tree
        others = max(0, level.bound.used - kept) if level.bound.shared else 0
        workers = {worker.name: worker.kept for worker in tree.workers}
        here = tree.kept - sum(worker.kept for worker in tree.workers)
        heaps = {THIS: tree.heap, OTHERS: others}
        heaps |= {worker.name: worker.heap for worker in tree.workers}
        return Held({THIS: here, OTHERS: others}, workers, heaps)

    def held(self, now: Held) -> str:
        """Return who holds memory: processes, the largest buffers, other programs."""
        largest = sorted(self._buffers.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{shown(name)} {readable(size)}" for name, size in largest)
        text = f"{THIS.capitalize()} holds {readable(now.kept[THIS])}" + (
            f" ({listed})" if listed else ""
        )
        if workers := now.kept_by_workers:
            name, most = max(workers.items(), key=lambda item: item[1])
            total = readable(sum(workers.values()))
            text += f", {len(workers)} more {total} (the largest is {name}, {readable(most)})"
        if now.kept[OTHERS] > _WORTH_NAMING:
            text += f", {OTHERS} {readable(now.kept[OTHERS])}"
        card = self._monitor.card
        return text if card is None else f"{text}; {readable(card.allocated())} on the device"

    def grown(self, now: Held) -> str:
        """Return what grew, the largest first, as a sentence with a space behind it, or ""."""
        before = (self._before or now).heaps
        # A new worker is all growth, or it replaces one that failed.
        changes = {name: size - before.get(name, 0) for name, size in now.heaps.items()}
        most = sorted(changes.items(), key=lambda item: -item[1])[:3]
        grown = [f"{name} by {readable(size)}" for name, size in most if size > _WORTH_NAMING]
        if changes.get(THIS, 0) > _WORTH_NAMING:
            grown += self._growers()
        return f"What grew since the start: {'; '.join(grown)}. " if grown else ""

    def remedy(self, now: Held, level: Level) -> str:
        """Return what to do at the limit: the keys of what holds a good part of it, if any does."""
        workers = now.kept_by_workers.values()
        sizes = {
            "agent.replay.capacity": self._buffers.get("replay", 0),
            "agent.rollout_steps": self._buffers.get("rollout", 0),
            "env.num_envs": sum(workers) - max(workers, default=0),  # one is needed
        }
        keys = [key for key, size in sizes.items() if size >= _WORTH_LOWERING * level.limit]
        higher = f" to {higher_limit(level)} or more" if level.is_own else ""
        return f"Raise the limit{higher}" + (f", or lower {' or '.join(keys)}" if keys else "")


def higher_limit(level: Level) -> str:
    """Return a `memory.limit_mb` with which a run that ended at its own limit goes on."""
    return enough_for(level.bound.used, _HIGHER * level.limit)
