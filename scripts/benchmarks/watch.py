"""Cost of memory monitoring and of checkpoints: runs with and without them, alternately."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from scripts.benchmarks.measuring import Ours, Stopwatch, ours, take_turns
from scripts.benchmarks.replay import build
from steadyrl.memory.watch import Peaks
from steadyrl.training.checkpoints.replay_blocks import ReplaySave
from steadyrl.training.checkpoints.store import Checkpoints

# Limit, leak detection and cache trimming are on by default.
WATCHED = ("total_steps=1e9", "eval.every=0")
METHODS = ("check", "on_update", "on_episodes", "on_rollout", "measure")
SPEED_METHODS = ("on_update", "on_log")


# What the monitors' methods return where nothing is measured; the progress line needs one metric.
NO_WATCH: dict[str, Any] = {
    **dict.fromkeys(("check", "on_update", "on_episodes", "on_rollout", "finish")),
    "pop_save_request": False,
    "measure": {"memory/rss_mb": 0.0},
    "peaks": Peaks(0, None),
    "nearest_limit": None,
}
NO_SPEED_WATCH: dict[str, Any] = {"on_update": None, "on_log": {}, "fill": None}


def silence(owner: object, returned: Mapping[str, Any]) -> None:
    """Let methods do nothing but return these values."""
    for name, value in returned.items():
        setattr(owner, name, lambda *_, value=value, **__: value)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `watch`, `save` and `saved-replay` to the benchmark command."""
    parser = subparsers.add_parser("saved-replay", help=save_replay.__doc__)
    parser.add_argument("--rows", type=int, default=150_000, help="transitions of 84x84 bytes")
    parser.set_defaults(run=save_replay)
    parser = subparsers.add_parser("save", help=compare_saving.__doc__)
    parser.add_argument("--steps", type=int, default=1_000, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds between checkpoints")
    parser.add_argument("--before", type=int, default=1_000, help="steps before the first turn")
    parser.add_argument("--set", nargs="*", default=["agent=dqn", "env=cartpole"])
    parser.set_defaults(run=compare_saving)
    parser = subparsers.add_parser("watch", help=__doc__)
    parser.add_argument("--steps", type=int, default=1_000, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--set", nargs="*", default=["agent=dqn", "env=cartpole"])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the cost of monitoring, by alternating turns and by timing its calls."""
    overrides = (*args.set, *WATCHED)
    with ExitStack() as stack:
        watched = stack.enter_context(ours(*overrides))
        blind = stack.enter_context(ours(*overrides))
        silence(blind.run._services.watch, NO_WATCH)
        silence(blind.run._speed, NO_SPEED_WATCH)
        for contestant in (watched, blind):
            contestant.train(args.steps)  # warm-up
        turns = take_turns(
            {
                "watched": lambda: watched.train(args.steps),
                "blind": lambda: blind.train(args.steps),
            },
            rounds=args.rounds,
            calls=1,
        )
        # Afterwards, because timers cost more than calls this short.
        clock = time_calls(watched)
        start = time.perf_counter()
        watched.train(args.steps * args.rounds)
        clocked = time.perf_counter() - start
    slower = median(w / b - 1 for w, b in zip(turns["watched"], turns["blind"], strict=True))
    spent = sum(clock.seconds.values()) / clocked
    print(f"{' '.join(args.set)}: {args.rounds} turns of {args.steps:,} steps")
    for name, seconds in turns.items():
        print(f"{name:8} {args.steps / median(seconds):10,.0f} steps/s (median)")
    print(
        f"slower by {slower:+.2%} (median over pairs of turns); monitoring calls take {spent:.3%}"
    )
    for name, total in clock.seconds.items():
        print(f"  {name:16} {total * 1e3:8.1f} ms")


def time_calls(contestant: Ours) -> Stopwatch:
    """Time every call of the monitors, the timers' own cost included."""
    clock = Stopwatch()
    for method in METHODS:
        clock.wrap(contestant.run._services.watch, method, method)
    for method in SPEED_METHODS:
        clock.wrap(contestant.run._speed, method, f"speed: {method}")
    return clock


def compare_saving(args: argparse.Namespace) -> None:
    """Train with and without checkpoints, alternately."""
    overrides = (*args.set, "total_steps=1e9", "eval.every=0")
    with ExitStack() as stack:
        saved = stack.enter_context(ours(*overrides, f"checkpoint.seconds={args.seconds}"))
        plain = stack.enter_context(ours(*overrides, "checkpoint.seconds=0"))
        for contestant in (saved, plain):
            contestant.train(args.before)

        trained = args.rounds * args.steps

        def save() -> None:
            nonlocal trained
            saved.train(args.steps)
            # The other run must not pay for a write in progress.
            while saved.run._services.saver.checkpoints.busy:
                saved.train(args.steps // 10)
                trained += args.steps // 10

        turns = take_turns(
            {"saved": save, "plain": lambda: plain.train(args.steps)},
            rounds=args.rounds,
            calls=1,
        )
    # Sums, not medians: most turns have no checkpoint.
    speeds = {
        "saved": trained / sum(turns["saved"]),
        "plain": args.rounds * args.steps / sum(turns["plain"]),
    }
    for name, speed in speeds.items():
        print(f"{name:8} {speed:10,.0f} steps/s")
    print(f"slower by {speeds['plain'] / speeds['saved'] - 1:+.2%} over {args.rounds} turns")


def save_replay(args: argparse.Namespace) -> None:
    """Save a filled replay twice during training; print step times, and memory every 5 ms."""
    replay = build(args.rows, (1, 84, 84), "uint8", 4)
    obs = np.random.default_rng(0).integers(0, 255, (1, 4, 84, 84), dtype=np.uint8)
    no, action, reward = np.zeros(1, np.bool_), np.zeros(1, np.int64), np.zeros(1, np.float32)

    def row(save: ReplaySave | None) -> float:
        begin = time.perf_counter()
        if save is not None:
            save.wait_for_overwrite()
        replay.add(action, reward, no, no, ~no, obs)
        replay.update_priorities(replay.sample(32, beta=0.5).index, torch.rand(32))
        return time.perf_counter() - begin

    replay.start(obs)
    for _ in range(args.rows + 500):
        replay.add(action, reward, no, no, ~no, obs)
    print(f"replay of {replay.nbytes / 1e6:,.0f} MB; ms per step (add, sample, update priorities)")
    print("| | seconds | p50 | p99 | max | extra MB |\n|---|---:|---:|---:|---:|---:|")
    _print_rows("no save", 0.0, [row(None) for _ in range(5000)], 0.0)
    with tempfile.TemporaryDirectory() as folder, memory_traced() as extra:
        checkpoints = Checkpoints(Path(folder) / "checkpoints", keep=2)
        for number in range(2):
            begin = time.perf_counter()
            save = ReplaySave(replay, checkpoints.last)
            checkpoints.save(number, save.parts(), {})
            times = [time.perf_counter() - begin]
            while checkpoints.busy:
                times.append(row(save))
            name = ("first save", "second save")[number]
            _print_rows(name, checkpoints.save_seconds, times, extra())
            for _ in range(3000):
                row(None)


def _print_rows(name: str, seconds: float, times: list[float], extra: float) -> None:
    p50, p99, most = (1e3 * value for value in (*np.percentile(times, [50, 99]), max(times)))
    print(f"| {name} | {seconds:.1f} | {p50:.2f} | {p99:.1f} | {most:.1f} | {extra:.0f} |")


@contextmanager
def memory_traced() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the peak growth of this process's RSS so far, in MB."""
    process, over = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def trace() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=trace, daemon=True)
    thread.start()
    try:
        yield lambda: (peak - before) / 1e6
    finally:
        over.set()
        thread.join()
