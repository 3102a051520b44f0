"""DQN and PPO on CartPole against other libraries; DQN on Pong with and without overlap."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from scripts.benchmarks.measuring import (
    Ours,
    Stopwatch,
    median_ratio,
    ours,
    print_speeds,
    take_turns,
)
from scripts.benchmarks.peers import SB3, dqn_peers, ppo_peers

WORK = (
    "agent=dqn",
    "env=cartpole",
    "device=cpu",
    "threads=1",
    "total_steps=1e7",
    "eval.every=0",
    "agent.hidden=[120,84]",
    "agent.batch_size=128",
    "agent.learning_rate=2.5e-4",
    "agent.learning_starts=1000",
    *("agent.train_every=1", "agent.updates_per_train=1"),
    # The peers have no double Q-learning, which costs another forward pass.
    "agent.double=false",
    "agent.target_every=500",
    *("agent.epsilon_fraction=0.0005", "agent.epsilon_end=0.05"),
    "agent.replay.prioritized=false",
)
PRIORITISED = ("agent.replay.prioritized=true", "agent.n_step=3")
OURS = {
    "eager uniform": ("agent.compile=false", "agent.n_step=1"),
    "eager prioritised + 3-step": ("agent.compile=false", *PRIORITISED),
    "compiled uniform": ("agent.compile=true", "agent.n_step=1"),
    "compiled prioritised + 3-step": ("agent.compile=true", *PRIORITISED),
}

PONG = (
    "experiment=pong_dqn",
    "device=cpu",
    "eval.every=0",
    "agent.learning_starts=1000",
    "agent.replay.capacity=20_000",
    "agent.compile=false",
    # One core for the learner, one for the emulators.
    "threads=1",
    "env.kwargs.num_threads=1",
)


class Pong(NamedTuple):
    """Image size, number of environments, and steps per update."""

    pixels: int
    envs: int
    train_every: int

    @property
    def overrides(self) -> tuple[str, ...]:
        """The configuration overrides."""
        return (
            f"+env.kwargs.img_height={self.pixels}",
            f"+env.kwargs.img_width={self.pixels}",
            f"env.num_envs={self.envs}",
            f"agent.train_every={self.train_every}",
        )


# The published ratio, where an update takes far longer than its steps; then configurations with
# similar times, where overlapping gains most.
PONGS = (Pong(84, 8, 4), Pong(84, 64, 64), Pong(42, 8, 4), Pong(42, 8, 8))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `dqn` and `overlap` to the benchmark command."""
    parser = subparsers.add_parser(
        "dqn", help="DQN: one CartPole, batch 128 after every step, MLP 120-84"
    )
    parser.add_argument("--steps", type=int, default=1_000, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns per contestant")
    parser.add_argument("--capacity", type=int, default=100_000, help="capacity of every replay")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides for SteadyRL")
    parser.set_defaults(run=compare)
    parser = subparsers.add_parser(
        "overlap", help="DQN on Pong: updates during or after the environment steps"
    )
    parser.add_argument("--steps", type=int, default=512, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns per contestant")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides")
    parser.set_defaults(run=compare_overlap)
    add_ppo_parser(subparsers)


def compare(args: argparse.Namespace) -> None:
    """Print steps per second, ratios, and a profile of a step."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        work = (*WORK, f"agent.replay.capacity={args.capacity}", *args.set)
        runs = {name: stack.enter_context(ours(*work, *more)) for name, more in OURS.items()}
        contestants: dict[str, Callable[[], object]] = {
            name: partial(one.train, args.steps) for name, one in runs.items()
        }
        peers = dqn_peers(args.capacity)
        contestants |= {name: partial(peer, args.steps) for name, peer in peers.items()}
        for one in runs.values():
            one.train(1_500)  # past learning_starts: compiled, and updating
        seconds = take_turns(contestants, rounds=args.rounds, calls=1)
        print_speeds(seconds, args.steps, SB3)
        for kind in ("eager", "compiled"):
            both = seconds[f"{kind} prioritised + 3-step"], seconds[f"{kind} uniform"]
            longer = median_ratio(*both)
            print(f"\n{kind}: prioritised + 3-step takes {longer:.3f}x the time of uniform")
        for name, one in runs.items():
            _breakdown(name, one, args.steps * 3)


def _breakdown(name: str, one: Ours, steps: int) -> None:
    watch = Stopwatch()
    agent: Any = one.agent
    watch.wrap(agent.actor(one.env.spec.num_envs, explore=True), "act", "act")
    watch.wrap(one.env, "send", "env")
    watch.wrap(one.env, "receive", "env")
    watch.wrap(agent, "collect_block", "env")
    watch.wrap(agent._replay, "add", "add")
    watch.wrap(agent._replay, "sample", "sample")
    watch.wrap(agent._learner, "step", "update")
    watch.wrap(agent._replay, "update_priorities", "priorities")
    watch.wrap(one.run, "on_steps", "log")
    begin = time.perf_counter()
    one.train(steps)
    total = time.perf_counter() - begin
    parts = {part: spent / steps * 1e6 for part, spent in watch.seconds.items()}
    parts["rest"] = total / steps * 1e6 - sum(parts.values())
    whole = sum(parts.values())
    around = whole - parts["act"] - parts["env"] - parts["update"]
    listed = "  ".join(f"{part} {spent:.1f}" for part, spent in parts.items())
    print(f"\n{name}, µs a step: {listed}  total {whole:.0f}")
    print(f"  around act, env and update: {100 * around / whole:.1f} %")


def compare_overlap(args: argparse.Namespace) -> None:
    """Print steps per second with and without overlap, and the time of both parts of a step."""
    print("| pixels | games | steps per update | overlapped | in turn | ratio | env | update |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for work in PONGS:
        _overlap(work, args)


def _overlap(work: Pong, args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(ours(*PONG, *work.overrides, *args.set))
            for name in ("overlapped", "in turn")
        }
        agent: Any = runs["in turn"].agent
        agent.can_update_during_step = False
        contestants: dict[str, Callable[[], object]] = {}
        for name, one in runs.items():
            one.train(1_500)  # updates have started
            contestants[name] = partial(one.train, args.steps)
        seconds = take_turns(contestants, rounds=args.rounds, calls=1)
        ratio = median_ratio(seconds["in turn"], seconds["overlapped"])
        speeds = (f"{args.steps / median(times):,.0f} steps/s" for times in seconds.values())
        cells = (
            *map(str, work),
            *speeds,
            f"{ratio:.2f}x",
            *_env_and_update(runs["in turn"], args.steps),
        )
        print("| " + " | ".join(cells) + " |")


def _env_and_update(one: Ours, steps: int) -> list[str]:
    """Return ms per step of the environments and of updates."""
    watch = Stopwatch()
    watch.wrap(one.env, "send", "env")
    watch.wrap(one.env, "receive", "env")
    watch.wrap(one.agent, "update", "update")
    one.train(steps)
    return [f"{watch.seconds[part] / steps * 1e3:.2f} ms" for part in ("env", "update")]


PPO_WORK = (
    "agent=ppo",
    "env=cartpole",
    "device=cpu",
    "threads=1",
    "total_steps=1e9",
    "eval.every=0",
    "agent.hidden=[64,64]",
    "agent.epochs=4",
    "agent.learning_rate=2.5e-4",
    *("agent.entropy_coef=0", "agent.value_coef=0.5", "agent.target_kl=null"),
    *("agent.normalize_obs=false", "agent.normalize_reward=false"),
)
PPO_OURS = {
    "sync eager": ("env.backend=sync", "agent.compile=false"),
    "sync compiled": ("env.backend=sync", "agent.compile=true"),
    "kernel eager": ("env.backend=kernel", "agent.compile=false"),
    "kernel compiled": ("env.backend=kernel", "agent.compile=true"),
    "batch eager": ("env.backend=batch", "agent.compile=false"),
    "batch compiled": ("env.backend=batch", "agent.compile=true"),
}


class Work(NamedTuple):
    """Shape of a rollout and its minibatches."""

    envs: int
    rows: int
    minibatches: int

    @property
    def steps(self) -> int:
        """Environment steps per iteration."""
        return self.envs * self.rows

    def __str__(self) -> str:
        size = self.steps // self.minibatches
        return f"{self.envs} environments x {self.rows} steps, minibatches of {size}"


# 64 environments in three shapes: longer rollouts with as many minibatches, or with minibatches as
# large, and rollouts as large as with 8 environments.
PPO_WORKS = (Work(8, 128, 4), Work(64, 128, 4), Work(64, 128, 32), Work(64, 16, 4))


def add_ppo_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ppo` to the benchmark command."""
    parser = subparsers.add_parser(
        "ppo", help="PPO: 8 or 64 CartPoles x 128 steps, 4 epochs x 4 minibatches, MLP 64-64"
    )
    parser.add_argument("--rows", type=int, default=8_192, help="environment steps per turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns per contestant")
    parser.set_defaults(run=compare_ppo)


def compare_ppo(args: argparse.Namespace) -> None:
    """Print steps per second, ratios, and a profile of an iteration."""
    torch.set_num_threads(1)
    for work in PPO_WORKS:
        _compare_ppo(work, args)


def _compare_ppo(work: Work, args: argparse.Namespace) -> None:
    iterations = max(1, args.rows // work.steps)
    steps = work.steps * iterations
    shape = (
        f"env.num_envs={work.envs}",
        f"agent.rollout_steps={work.rows}",
        f"agent.minibatches={work.minibatches}",
    )
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(ours(*PPO_WORK, *shape, *more))
            for name, more in PPO_OURS.items()
        }
        contestants: dict[str, Callable[[], object]] = {
            name: partial(one.train, steps) for name, one in runs.items()
        }
        contestants |= {name: partial(peer, steps) for name, peer in ppo_peers(*work).items()}
        for one in runs.values():
            one.train(2 * work.steps)  # compiled, and memory touched
        print(f"\n{work}")
        print_speeds(take_turns(contestants, rounds=args.rounds, calls=1), steps, SB3)
        for name, one in runs.items():
            _ppo_breakdown(name, one, work, iterations)


def _ppo_breakdown(name: str, one: Ours, work: Work, iterations: int) -> None:
    watch = Stopwatch()
    agent: Any = one.agent
    watch.wrap(agent.actor(one.env.spec.num_envs, explore=True), "act", "act")
    watch.wrap(one.env, "send", "env")
    watch.wrap(one.env, "receive", "env")
    watch.wrap(agent, "observe", "store")
    watch.wrap(agent, "collect_block", "rows")
    watch.wrap(agent, "_compute_targets", "GAE")
    watch.wrap(agent._learner, "step", "update")
    watch.wrap(one.run, "on_steps", "log")
    begin = time.perf_counter()
    one.train(work.steps * iterations)
    total = time.perf_counter() - begin
    parts = {part: spent / iterations * 1e3 for part, spent in watch.seconds.items()}
    parts["rest"] = total / iterations * 1e3 - sum(parts.values())
    listed = "  ".join(f"{part} {spent:.2f}" for part, spent in parts.items())
    print(f"\n{name}, ms an iteration: {listed}  total {sum(parts.values()):.2f}")
