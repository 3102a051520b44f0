"""Replay buffer: speed against cpprb and Tianshou, memory against Stable-Baselines3."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from scripts.benchmarks.measuring import median_ratio, take_turns
from scripts.benchmarks.peers import SB3, installed
from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.buffers.replay.build import build_replay
from steadyrl.buffers.replay.settings import ReplaySettings

OURS = "SteadyRL, n-step {}"
ALPHA, BETA = 0.6, 0.4  # prioritisation exponents of every replay
EPISODE = 200  # transitions


class Data(NamedTuple):
    """Input of all contestants."""

    obs: NDArray[np.float32]  # [rows, size]
    reward: NDArray[np.float32]  # [rows]
    done: NDArray[np.bool_]  # [rows]
    error: NDArray[np.float32]  # [rows] for priorities


def make_data(rows: int, size: int) -> Data:
    """Return random transitions; every EPISODE-th ends an episode."""
    random = np.random.default_rng(0)
    done = np.zeros(rows, np.bool_)
    done[EPISODE - 1 :: EPISODE] = True
    return Data(
        random.random((rows, size), np.float32),
        random.random(rows, np.float32),
        done,
        random.exponential(size=rows).astype(np.float32),
    )


Cycle = Callable[[int], Callable[[], None]]  # batch size -> one add + sample + priority update


def cpprb(data: Data) -> Cycle:
    """Return cycles of cpprb's prioritised buffer (1-step, its default)."""
    from cpprb import PrioritizedReplayBuffer

    size, rows = data.obs.shape[1], len(data.obs)
    plain: dict[str, Any] = {"rew": {}, "done": {}, "act": {"dtype": np.int64}}
    fields = {"obs": {"shape": size}, "next_obs": {"shape": size}, **plain}
    replay = PrioritizedReplayBuffer(rows, fields, alpha=ALPHA)
    replay.add(
        obs=data.obs,
        next_obs=data.obs,
        rew=data.reward,
        done=data.done,
        act=np.zeros(rows, np.int64),
    )
    replay.update_priorities(np.arange(rows), data.error)
    row = 0

    def cycle(batch_size: int) -> Callable[[], None]:
        error = data.error[:batch_size].copy()

        def once() -> None:
            nonlocal row
            row = (row + 1) % rows
            obs = data.obs[row]
            replay.add(obs=obs, next_obs=obs, rew=data.reward[row], done=data.done[row], act=0)
            batch = replay.sample(batch_size, beta=BETA)
            replay.update_priorities(batch["indexes"], error)

        return once

    return cycle


def tianshou(data: Data) -> Cycle:
    """Return cycles of Tianshou's prioritised buffer (1-step; n-step is in its algorithm)."""
    from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

    rows = len(data.obs)
    replay = PrioritizedReplayBuffer(rows, alpha=ALPHA, beta=BETA)
    filled = ReplayBuffer.from_data(
        data.obs,
        np.zeros(rows, np.int64),
        data.reward,
        data.done,
        np.zeros(rows, np.bool_),
        data.done,
        data.obs,
    )
    replay.update(filled)
    replay.update_weight(np.arange(rows), data.error)
    row = 0

    def cycle(batch_size: int) -> Callable[[], None]:
        error = data.error[:batch_size].copy()

        def once() -> None:
            nonlocal row
            row = (row + 1) % rows
            obs, done = data.obs[row], bool(data.done[row])
            step: Any = Batch(
                obs=obs,
                act=0,
                rew=data.reward[row],
                terminated=done,
                truncated=False,
                obs_next=obs,
                info={},
            )
            replay.add(step)
            _, index = replay.sample(batch_size)
            replay.update_weight(index, error)

        return once

    return cycle


def sb3_replay_bytes(capacity: int, shape: tuple[int, ...], dtype: Any, optimised: bool) -> int:
    """Return the bytes of all arrays of Stable-Baselines3's uniform replay."""
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import ReplayBuffer as Theirs

    replay = Theirs(
        capacity,
        Box(0, 1 if dtype == np.float32 else 255, shape, dtype),
        Discrete(6),
        device="cpu",
        optimize_memory_usage=optimised,
        handle_timeout_termination=not optimised,  # not both are supported
    )
    return sum(part.nbytes for part in vars(replay).values() if isinstance(part, np.ndarray))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `replay` and `memory` to the benchmark command."""
    parser = subparsers.add_parser("replay", help=compare_speed.__doc__)
    parser.add_argument("--rows", type=whole, default=1_000_000)
    parser.add_argument("--size", type=int, default=8, help="floats per observation")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--n-steps", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cycles", type=int, default=300, help="cycles per round")
    parser.set_defaults(run=compare_speed)
    parser = subparsers.add_parser("memory", help=compare_bytes.__doc__)
    parser.add_argument("--capacity", type=whole, default=20_000)
    parser.set_defaults(run=compare_bytes)


def whole(text: str) -> int:
    """Parse an integer; 1e6 is accepted."""
    return int(float(text))


def compare_speed(args: argparse.Namespace) -> None:
    """Time one add + sample + priority update, against cpprb and Tianshou."""
    torch.set_num_threads(1)
    data = make_data(args.rows, args.size)
    replays: dict[str, Cycle] = {OURS.format(n): ours(data, n) for n in args.n_steps}
    for name, module, fill in (("cpprb", "cpprb", cpprb), ("Tianshou", "tianshou", tianshou)):
        if installed(module, name):
            replays[name] = fill(data)
    reference = OURS.format(max(args.n_steps))
    print(f"{args.rows:,} rows, {args.size} floats; ratio = time / time of {reference}")
    print()
    print("| replay | batch | µs per cycle | fastest to slowest round | ratio |")
    print("|---|---:|---:|---:|---:|")
    for batch in args.batches:
        cycles = {name: cycle(batch) for name, cycle in replays.items()}
        seconds = take_turns(cycles, rounds=args.rounds, calls=args.cycles)
        for name, times in seconds.items():
            micro = [1e6 * time for time in times]
            spread = f"{min(micro):.1f} to {max(micro):.1f}"
            ratio = median_ratio(times, seconds[reference])
            print(f"| {name} | {batch} | {median(micro):.1f} | {spread} | {ratio:.2f} |")


def compare_bytes(args: argparse.Namespace) -> None:
    """Print bytes per transition, against both modes of Stable-Baselines3."""
    peers = installed("stable_baselines3", SB3)
    print(f"capacity {args.capacity:,}, one environment, n-step 3; bytes per transition")
    print()
    print("| replay | 8 floats | 84x84x4 bytes |")
    print("|---|---:|---:|")
    for name, prioritized in (("uniform", False), ("prioritised", True)):
        sizes = [
            build(args.capacity, shape, dtype, stack, prioritized=prioritized).nbytes
            / args.capacity
            for shape, dtype, stack in (((8,), "float32", 1), ((1, 84, 84), "uint8", 4))
        ]
        print(f"| SteadyRL, {name} | {sizes[0]:,.1f} | {sizes[1]:,.1f} |")
    if peers:
        for name, optimised in (("default", False), ("optimize_memory_usage", True)):
            sizes = [
                sb3_replay_bytes(args.capacity, shape, dtype, optimised) / args.capacity
                for shape, dtype in (((8,), np.float32), ((4, 84, 84), np.uint8))
            ]
            print(f"| {SB3}, {name} | {sizes[0]:,.1f} | {sizes[1]:,.1f} |")


def build(
    capacity: int,
    frame: tuple[int, ...],
    dtype: str = "float32",
    stack: int = 1,
    *,
    prioritized: bool = True,
    n_step: int = 3,
) -> ReplayBuffer:
    """Build SteadyRL's replay for one environment."""
    settings = ReplaySettings(
        capacity=capacity,
        prioritized=prioritized,
        alpha=ALPHA,
        beta_start=BETA,
        beta_end=1.0,
        anneal_beta="linear",
        beta_warmup=0.0,
        normalize_weights="replay",
        device="cpu",
    )
    return build_replay(
        settings,
        frame_shape=frame,
        dtype=dtype,
        frame_stack=stack,
        num_envs=1,
        n_step=n_step,
        gamma=0.99,
        device=torch.device("cpu"),
        seed=0,
    )


def ours(data: Data, n_step: int) -> Cycle:
    """Return cycles of SteadyRL's replay; an invalid (reset) step follows each episode."""
    replay = build(len(data.obs), data.obs.shape[1:], n_step=n_step)
    no, yes, action = np.zeros(1, np.bool_), np.ones(1, np.bool_), np.zeros(1, np.int64)
    done = data.done.tolist()
    replay.start(data.obs[:1])
    row = 0
    resets = False

    def add() -> None:
        nonlocal row, resets
        ends = done[row] and not resets
        here = slice(row, row + 1)
        terminated, valid = yes if ends else no, no if resets else yes
        replay.add(action, data.reward[here], terminated, no, valid, data.obs[here])
        resets = ends
        row = (row + 1) % len(done)

    while len(replay) < len(data.obs) * (EPISODE - 2) // EPISODE:
        add()
    errors = torch.from_numpy(data.error)
    for ids in torch.arange(len(data.obs)).split(4096):
        replay.update_priorities(ids, errors[ids])

    def cycle(batch_size: int) -> Callable[[], None]:
        error = errors[:batch_size].clone()

        def once() -> None:
            add()
            batch = replay.sample(batch_size, beta=BETA)
            replay.update_priorities(batch.index, error)

        return once

    return cycle
