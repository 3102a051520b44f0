"""PPO on CartPole: 8 or 64 environments x 128 steps, 4 epochs x 4 minibatches, layers 64-64."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

from scripts.benchmarks.measuring import Ours, Stopwatch, ours, print_speeds, take_turns
from scripts.benchmarks.peers import SB3, sb3_ppo

WORK = (
    "agent=ppo",
    "env=cartpole",
    "device=cpu",
    "threads=1",
    "total_steps=1e9",
    "eval.every=0",
    "agent.hidden=[64,64]",
    "agent.epochs=4",
    "agent.learning_rate=2.5e-4",
)
OURS = {
    "sync eager": ("env.backend=sync", "agent.compile=false"),
    "kernel eager": ("env.backend=kernel", "agent.compile=false"),
    "kernel compiled": ("env.backend=kernel", "agent.compile=true"),
    "native eager": ("env.backend=native", "agent.compile=false"),
    "native compiled": ("env.backend=native", "agent.compile=true"),
}


class Work(NamedTuple):
    """The shape of a rollout and of its minibatches."""

    envs: int
    rows: int
    minibatches: int

    @property
    def steps(self) -> int:
        """Environment steps of an iteration."""
        return self.envs * self.rows

    def __str__(self) -> str:
        size = self.steps // self.minibatches
        return f"{self.envs} environments x {self.rows} steps, minibatches of {size}"


# 64 environments in three shapes, because what is compared depends on it: longer rollouts cut
# into as many minibatches, or into minibatches as large, and as many rows as with 8.
WORKS = (Work(8, 128, 4), Work(64, 128, 4), Work(64, 128, 32), Work(64, 16, 4))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ppo` to the benchmark command."""
    parser = subparsers.add_parser("ppo", help=__doc__)
    parser.add_argument("--rows", type=int, default=8_192, help="environment steps a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print steps per second, ratios, and where the time of an iteration goes."""
    torch.set_num_threads(1)
    for work in WORKS:
        _compare(work, args)


def _compare(work: Work, args: argparse.Namespace) -> None:
    iterations = max(1, args.rows // work.steps)
    steps = work.steps * iterations
    shape = (
        f"env.num_envs={work.envs}",
        f"agent.rollout_steps={work.rows}",
        f"agent.minibatches={work.minibatches}",
    )
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(ours(*WORK, *shape, *more)) for name, more in OURS.items()
        }
        contestants: dict[str, Callable[[], object]] = {
            name: partial(one.train, steps) for name, one in runs.items()
        }
        peer = sb3_ppo(*work)
        if peer is not None:
            contestants[SB3] = partial(peer, steps)
        for one in runs.values():
            one.train(2 * work.steps)  # compiled, and memory touched
        print(f"\n{work}")
        print_speeds(take_turns(contestants, rounds=args.rounds, calls=1), steps, SB3)
        for name, one in runs.items():
            _breakdown(name, one, work, iterations)


def _breakdown(name: str, one: Ours, work: Work, iterations: int) -> None:
    watch = Stopwatch()
    agent: Any = one.agent
    watch.wrap(agent.actor(one.env.spec.num_envs, explore=True), "act", "act")
    watch.wrap(one.env, "send", "env")
    watch.wrap(one.env, "receive", "env")
    watch.wrap(agent, "observe", "store")
    watch.wrap(agent, "_finish_rollout", "GAE")
    watch.wrap(agent, "_learn", "update")
    watch.wrap(one.run, "record", "log")
    begin = time.perf_counter()
    one.train(work.steps * iterations)
    total = time.perf_counter() - begin
    parts = {part: spent / iterations * 1e3 for part, spent in watch.seconds.items()}
    parts["rest"] = total / iterations * 1e3 - sum(parts.values())
    listed = "  ".join(f"{part} {spent:.2f}" for part, spent in parts.items())
    print(f"\n{name}, ms an iteration: {listed}  total {sum(parts.values()):.2f}")
