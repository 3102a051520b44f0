"""DQN on Pong, learning while ALE's threads step or after them: the same rows, in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from scripts.benchmarks.ours import Ours, Stopwatch, ours
from scripts.benchmarks.turns import median_ratio, take_turns

WORK = (
    "experiment=pong_dqn",
    "device=cpu",
    "eval.every=0",
    "agent.learning_starts=1000",
    "agent.replay.capacity=20_000",
    "agent.compile=false",
)
# Environment steps for each update; 4 is the published ratio.
RATIOS = (4, 8, 16, 32)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `overlap` to the benchmark command."""
    parser = subparsers.add_parser("overlap", help=__doc__)
    parser.add_argument("--steps", type=int, default=256, help="steps a turn")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--train-every", type=int, nargs="+", default=list(RATIOS))
    parser.add_argument("--set", nargs="*", default=[], help="more overrides")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print steps per second with and without overlap, for several shares of learning."""
    print("| steps per update | overlapped, steps/s | one after the other | ratio | env | update |")
    print("|---:|---:|---:|---:|---:|---:|")
    for train_every in args.train_every:
        _compare(train_every, args)


def _compare(train_every: int, args: argparse.Namespace) -> None:
    overrides = (*WORK, f"agent.train_every={train_every}", *args.set)
    with ExitStack() as stack:
        runs = {n: stack.enter_context(ours(*overrides)) for n in ("overlapped", "in turn")}
        agent: Any = runs["in turn"].agent
        agent.overlaps = False
        contestants: dict[str, Callable[[], object]] = {}
        for name, one in runs.items():
            one.train(1_500)  # learning has begun
            contestants[name] = partial(one.train, args.steps)
        seconds = take_turns(contestants, rounds=args.rounds, calls=1)
        ratio = median_ratio(seconds["in turn"], seconds["overlapped"])
        speeds = (f"{args.steps / median(times):,.0f}" for times in seconds.values())
        parts = _parts(runs["in turn"], args.steps)
        print("| " + " | ".join((str(train_every), *speeds, f"{ratio:.2f}x", *parts)) + " |")


def _parts(one: Ours, steps: int) -> list[str]:
    """Return the milliseconds per step that go into the environments and into learning."""
    watch = Stopwatch()
    watch.wrap(one.env, "send", "env")
    watch.wrap(one.env, "receive", "env")
    watch.wrap(one.agent, "update", "update")
    one.train(steps)
    return [f"{watch.seconds[part] / steps * 1e3:.2f} ms" for part in ("env", "update")]
