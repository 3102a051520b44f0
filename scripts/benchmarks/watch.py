"""What watching memory costs a run: the same training with and without it, in turns."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from statistics import median

from memory.watch import MemoryWatch
from scripts.benchmarks.measuring import Ours, Stopwatch, ours, take_turns

# A limit nobody reaches turns its checks on; leaks and caches are watched by default.
WATCHED = ("memory.limit_mb=1e9", "total_steps=1e9", "eval.every=0")
METHODS = ("on_update", "on_episodes", "on_rollout", "measure")


class Blind(MemoryWatch):
    """A watch that sees nothing, to compare with."""

    def __init__(self) -> None:
        """Hold nothing."""

    def on_update(self, count: int = 1) -> None:
        """Look away."""

    def on_episodes(self, count: int) -> None:
        """Look away."""

    def on_rollout(self) -> None:
        """Look away."""

    def measure(self, step: int) -> dict[str, float]:
        """Have nothing to log but the one number the progress line shows."""
        return {"memory/rss_mb": 0.0}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `watch` to the benchmark command."""
    parser = subparsers.add_parser("watch", help=__doc__)
    parser.add_argument("--steps", type=int, default=1_000, help="per turn")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--set", nargs="*", default=["agent=dqn", "env=cartpole"])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print what watching takes, by turns and by the clock around each of its calls."""
    overrides = (*args.set, *WATCHED)
    with ExitStack() as stack:
        watched = stack.enter_context(ours(*overrides))
        blind = stack.enter_context(ours(*overrides))
        blind.run._instruments = blind.run._instruments._replace(watch=Blind())
        for contestant in (watched, blind):
            contestant.train(args.steps)  # what is built once is built here
        turns = take_turns(
            {
                "watched": lambda: watched.train(args.steps),
                "blind": lambda: blind.train(args.steps),
            },
            rounds=args.rounds,
            calls=1,
        )
        # Only now: a clock around calls this short would be most of their cost.
        clock = time_calls(watched)
        start = time.perf_counter()
        watched.train(args.steps * args.rounds)
        clocked = time.perf_counter() - start
    slower = median(w / b - 1 for w, b in zip(turns["watched"], turns["blind"], strict=True))
    spent = sum(clock.seconds.values()) / clocked
    print(f"{' '.join(args.set)}: {args.rounds} turns of {args.steps:,} steps each")
    for name, seconds in turns.items():
        print(f"{name:8} {args.steps / median(seconds):10,.0f} steps/s (median)")
    print(f"slower by {slower:+.2%} (median over pairs of turns); its calls take {spent:.3%}")
    for name, total in clock.seconds.items():
        print(f"  {name:12} {total * 1e3:8.1f} ms")


def time_calls(contestant: Ours) -> Stopwatch:
    """Put a clock around every call of the watch; what it adds counts against the watch."""
    clock = Stopwatch()
    for method in METHODS:
        clock.wrap(contestant.run._instruments.watch, method, method)
    return clock
