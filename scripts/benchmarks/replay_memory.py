"""Replay memory: bytes a transition, beside Stable-Baselines3's two ways to store it."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from buffers.replay import ReplayBuffer, build_replay
from buffers.settings import ReplaySettings


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `memory` to the benchmark command."""
    parser = subparsers.add_parser("memory", help=__doc__)
    parser.add_argument("--capacity", type=lambda text: int(float(text)), default=20_000)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print a Markdown table: what a replay of this capacity holds, by transition."""
    peers = find_spec("stable_baselines3") is not None
    if not peers:
        print('Stable-Baselines3 is not installed: pip install -e ".[peers]"')
    print(f"capacity {args.capacity:,}, one environment, n-step 3; bytes per transition")
    print()
    print("| replay | 8 floats | 84x84x4 bytes |")
    print("|---|---:|---:|")
    for name, prioritized in (("uniform", False), ("prioritised", True)):
        sizes = [
            ours(args.capacity, shape, dtype, stack, prioritized=prioritized).nbytes / args.capacity
            for shape, dtype, stack in (((8,), "float32", 1), ((1, 84, 84), "uint8", 4))
        ]
        print(f"| SteadyRL, {name} | {sizes[0]:,.1f} | {sizes[1]:,.1f} |")
    if peers:
        for name, optimised in (("default", False), ("optimize_memory_usage", True)):
            sizes = [
                stable_baselines3(args.capacity, shape, dtype, optimised) / args.capacity
                for shape, dtype in (((8,), np.float32), ((4, 84, 84), np.uint8))
            ]
            print(f"| Stable-Baselines3, {name} | {sizes[0]:,.1f} | {sizes[1]:,.1f} |")


def ours(
    capacity: int, frame: tuple[int, ...], dtype: str, stack: int, *, prioritized: bool
) -> ReplayBuffer:
    """Build this program's replay for one environment."""
    settings = ReplaySettings(
        capacity=capacity,
        prioritized=prioritized,
        alpha=0.6,
        beta_start=0.4,
        beta_end=1.0,
        device="cpu",
    )
    return build_replay(
        settings,
        frame_shape=frame,
        dtype=dtype,
        frame_stack=stack,
        num_envs=1,
        n_step=3,
        gamma=0.99,
        device=torch.device("cpu"),
        seed=0,
    )


def stable_baselines3(capacity: int, shape: tuple[int, ...], dtype: Any, optimised: bool) -> int:
    """Return the bytes of all arrays of its (uniform) replay."""
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import ReplayBuffer as Theirs

    replay = Theirs(
        capacity,
        Box(0, 1 if dtype == np.float32 else 255, shape, dtype),
        Discrete(6),
        device="cpu",
        optimize_memory_usage=optimised,
        handle_timeout_termination=not optimised,  # it has not both
    )
    return sum(part.nbytes for part in vars(replay).values() if isinstance(part, np.ndarray))
