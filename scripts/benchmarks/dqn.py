"""DQN on CartPole: one environment, a batch of 128 after every step, layers of 120 and 84."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch

from scripts.benchmarks.ours import Ours, Stopwatch, ours
from scripts.benchmarks.turns import median_ratio, take_turns

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
    "agent.train_every=1",
    "agent.updates_per_train=1",
    # The peers have no double Q-learning; it costs one more forward pass.
    "agent.double=false",
    "agent.target_every=500",
    "agent.epsilon_fraction=0.0005",
    "agent.epsilon_end=0.05",
    "agent.replay.capacity=100_000",
)
PRIORITISED = ("agent.replay.prioritized=true", "agent.n_step=3")
OURS = {
    "eager uniform": ("agent.compile=false", "agent.n_step=1"),
    "eager prioritised + 3-step": ("agent.compile=false", *PRIORITISED),
    "compiled uniform": ("agent.compile=true", "agent.n_step=1"),
    "compiled prioritised + 3-step": ("agent.compile=true", *PRIORITISED),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `dqn` to the benchmark command."""
    parser = subparsers.add_parser("dqn", help=__doc__)
    parser.add_argument("--steps", type=int, default=1_000, help="steps a turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print steps per second, ratios, and where the time of a step goes."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        runs = {name: stack.enter_context(ours(*WORK, *more)) for name, more in OURS.items()}
        contestants: dict[str, Callable[[], object]] = {
            name: partial(one.train, args.steps) for name, one in runs.items()
        }
        peer = stable_baselines3()
        if peer is not None:
            contestants["Stable-Baselines3"] = partial(peer, args.steps)
        for one in runs.values():
            one.train(1_500)  # past learning_starts: compiled, and learning
        seconds = take_turns(contestants, rounds=args.rounds, calls=1)
        _speeds(seconds, args.steps)
        for name, one in runs.items():
            _breakdown(name, one, args.steps * 3)


def stable_baselines3() -> Callable[[int], object] | None:
    """Return the same work in Stable-Baselines3, or None where it is not installed."""
    try:
        from stable_baselines3 import DQN
    except ImportError:
        print("Stable-Baselines3 is not installed: ours only")
        return None
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=2.5e-4,
        buffer_size=100_000,
        learning_starts=1_000,
        batch_size=128,
        train_freq=1,
        gradient_steps=1,
        target_update_interval=500,
        exploration_fraction=0.05,
        policy_kwargs={"net_arch": [120, 84]},
        device="cpu",
        seed=0,
    )
    model.learn(1_500)
    return lambda steps: model.learn(steps, reset_num_timesteps=False)


def _speeds(seconds: dict[str, list[float]], steps: int) -> None:
    peer = seconds.get("Stable-Baselines3")
    print("\n| contestant | steps/s | against Stable-Baselines3 |\n|---|---:|---:|")
    for name, times in seconds.items():
        against = "-" if peer is None else f"{median_ratio(peer, times):.2f}x"
        print(f"| {name} | {steps / median(times):,.0f} | {against} |")
    for kind in ("eager", "compiled"):
        both = seconds[f"{kind} prioritised + 3-step"], seconds[f"{kind} uniform"]
        print(
            f"\n{kind}: prioritised + 3-step takes {median_ratio(*both):.3f}x the time of uniform"
        )


def _breakdown(name: str, one: Ours, steps: int) -> None:
    watch = Stopwatch()
    agent: Any = one.agent
    watch.wrap(agent, "act", "act")
    watch.wrap(one.env, "send", "env")
    watch.wrap(one.env, "receive", "env")
    watch.wrap(agent._replay, "add", "add")
    watch.wrap(agent._replay, "sample", "sample")
    watch.wrap(agent._learner, "step", "update")
    watch.wrap(agent._replay, "update_priorities", "priorities")
    watch.wrap(one.run, "record", "log")
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
