"""DQN on Pong, learning while ALE's threads step or after them: the same rows, in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from scripts.benchmarks.ours import Ours, Stopwatch, ours
from scripts.benchmarks.turns import median_ratio, take_turns

WORK = (
    "experiment=pong_dqn",
    "device=cpu",
    "eval.every=0",
    "agent.learning_starts=1000",
    "agent.replay.capacity=20_000",
    "agent.compile=false",
    # A core for the learner, one for the emulators.
    "threads=1",
    "env.kwargs.num_threads=1",
)


class Work(NamedTuple):
    """How large the pictures are, how many games there are, how many steps an update is due."""

    pixels: int
    envs: int
    train_every: int

    @property
    def overrides(self) -> tuple[str, ...]:
        """The work as overrides."""
        return (
            f"+env.kwargs.img_height={self.pixels}",
            f"+env.kwargs.img_width={self.pixels}",
            f"env.num_envs={self.envs}",
            f"agent.train_every={self.train_every}",
        )


# The published ratio, where an update takes many times what its steps do; then works in which the
# two are nearer to each other, which is where doing both at once can gain.
WORKS = (Work(84, 8, 4), Work(84, 64, 64), Work(42, 8, 4), Work(42, 8, 8))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `overlap` to the benchmark command."""
    parser = subparsers.add_parser("overlap", help=__doc__)
    parser.add_argument("--steps", type=int, default=512, help="steps a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print steps per second with and without overlap, and what a step takes of both."""
    print("| pixels | games | steps per update | overlapped | in turn | ratio | env | update |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for work in WORKS:
        _compare(work, args)


def _compare(work: Work, args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(ours(*WORK, *work.overrides, *args.set))
            for name in ("overlapped", "in turn")
        }
        agent: Any = runs["in turn"].agent
        agent.overlaps = False
        contestants: dict[str, Callable[[], object]] = {}
        for name, one in runs.items():
            one.train(1_500)  # learning has begun
            contestants[name] = partial(one.train, args.steps)
        seconds = take_turns(contestants, rounds=args.rounds, calls=1)
        ratio = median_ratio(seconds["in turn"], seconds["overlapped"])
        speeds = (f"{args.steps / median(times):,.0f} steps/s" for times in seconds.values())
        cells = (*map(str, work), *speeds, f"{ratio:.2f}x", *_parts(runs["in turn"], args.steps))
        print("| " + " | ".join(cells) + " |")


def _parts(one: Ours, steps: int) -> list[str]:
    """Return the milliseconds per step that go into the environments and into learning."""
    watch = Stopwatch()
    watch.wrap(one.env, "send", "env")
    watch.wrap(one.env, "receive", "env")
    watch.wrap(one.agent, "update", "update")
    one.train(steps)
    return [f"{watch.seconds[part] / steps * 1e3:.2f} ms" for part in ("env", "update")]
