"""Rollout buffer: filling it in place, against lists that are transposed and concatenated.

Also steps per second of the environments with every backend.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch import Tensor

from scripts.benchmarks.measuring import median_ratio, take_turns
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.core.errors import SettingError
from steadyrl.envs.factory import build_env
from steadyrl.envs.settings import BackendName, EnvSettings
from steadyrl.envs.types import BoxActions, DiscreteActions, EnvSpec
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.config.settings import CONFIGS

BACKENDS: tuple[BackendName, ...] = ("kernel", "batch", "envpool", "sync")
PRESETS = (
    "cartpole",
    "acrobot",
    "mountaincar",
    "mountaincar_continuous",
    "pendulum",
    "frozenlake",
    "cliffwalking",
    "taxi",
    "minatar_asterix",
    "minatar_breakout",
    "minatar_freeway",
    "minatar_seaquest",
    "minatar_spaceinvaders",
)
PRESET_FOLDER = CONFIGS / "env"


class Row(NamedTuple):
    """A timestep: four tensors from the networks, four arrays from the environments."""

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    reward: NDArray
    terminated: NDArray
    truncated: NDArray
    valid: NDArray


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `rollout` and `environments` to the benchmark command."""
    parser = subparsers.add_parser("environments", help=compare_backends.__doc__)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument(
        "--envs", nargs="+", type=int, default=(1, 8, 64), help="numbers of environments"
    )
    parser.add_argument("--steps", type=int, default=4_096, help="environment steps per turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.set_defaults(run=compare_backends)
    parser = subparsers.add_parser("rollout", help=fill.__doc__)
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--size", type=int, default=8, help="floats per observation")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(run=fill)


def fill(args: argparse.Namespace) -> None:
    """Print a Markdown table: time and peak transient memory of filling a rollout."""
    torch.set_num_threads(1)
    device = torch.device(args.device)
    rollout = RolloutBuffer(
        steps=args.steps,
        num_envs=args.workers,
        observation_shape=(args.size,),
        observation_dtype=torch.float32,
        action_shape=(),
        action_dtype=torch.int64,
        device=device,
    )
    ways: dict[str, Callable[[Iterable[Row]], object]] = {
        "in place": lambda rows: fill_in_place(rollout, rows),
        "a list of rows": lambda rows: fill_lists(rows, device),
        "a list for each worker": lambda rows: fill_worker_lists(rows, args.workers, device),
    }
    rows = list(make_rows(args.steps, args.workers, args.size, device))
    seconds = take_turns(
        {name: lambda way=way: way(rows) for name, way in ways.items()},  # type: ignore[misc]
        rounds=args.rounds,
        calls=1,
    )
    print(f"{args.steps:,} steps x {args.workers} workers, {args.size} floats, on {device}")
    print()
    print("| way | ms per rollout | ratio | transient KB | kept KB |")
    print("|---|---:|---:|---:|---:|")
    for name, way in ways.items():
        transient = most_in_use(way, make_rows(args.steps, args.workers, args.size, device))
        retained = rollout.nbytes / 1e3 if name == "in place" else 0
        milli, ratio = 1e3 * median(seconds[name]), median_ratio(seconds[name], seconds["in place"])
        print(f"| {name} | {milli:.2f} | {ratio:.2f} | {transient / 1e3:.0f} | {retained:.0f} |")


def make_rows(steps: int, workers: int, size: int, device: torch.device) -> Iterator[Row]:
    """Yield timesteps as in training: new tensors, reused arrays."""
    random = np.random.default_rng(0)
    reward = np.zeros(workers, np.float32)
    no, yes = np.zeros(workers, np.bool_), np.ones(workers, np.bool_)
    for _ in range(steps):
        random.random(out=reward, dtype=np.float32)
        obs = torch.from_numpy(random.random((workers, size), np.float32)).to(device)
        action = torch.zeros(workers, dtype=torch.int64, device=device)
        log_prob, value = torch.zeros(workers, device=device), torch.zeros(workers, device=device)
        yield Row(obs, action, log_prob, value, reward, no, no, yes)


def fill_in_place(rollout: RolloutBuffer, rows: Iterable[Row]) -> None:
    """Copy every timestep into the buffer."""
    rollout.clear()
    for row in rows:
        rollout.add(*row)


def fill_lists(rows: Iterable[Row], device: torch.device) -> list[Tensor]:
    """Collect timesteps in a list, transpose it to fields, concatenate and move each."""
    trajectory = [(*row[:4], *(torch.tensor(part) for part in row[4:])) for row in rows]
    fields = list(map(list, zip(*trajectory, strict=True)))
    return [torch.cat(field).to(device) for field in fields]


def fill_worker_lists(rows: Iterable[Row], workers: int, device: torch.device) -> list[Tensor]:
    """Do the same with one list per worker."""
    trajectories: list[list[tuple[Tensor, ...]]] = [[] for _ in range(workers)]
    for row in rows:
        for worker, trajectory in enumerate(trajectories):
            made = (part[worker : worker + 1].clone() for part in row[:4])
            given = (torch.tensor(part[worker : worker + 1]) for part in row[4:])
            trajectory.append((*made, *given))
    transposed = [list(map(list, zip(*trajectory, strict=True))) for trajectory in trajectories]
    fields = zip(*transposed, strict=True)
    return [torch.cat([part for own in field for part in own]).to(device) for field in fields]


class _Mallinfo(ctypes.Structure):
    """glibc's mallinfo2; bytes in use are `hblkhd` (mapped) plus `uordblks` (heap)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_bytes() -> int:
    """Return the bytes allocated by malloc (Python's small objects excluded)."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _Mallinfo
    state = info()
    return int(state.hblkhd + state.uordblks)


def most_in_use(way: Callable[[Iterable[Row]], object], rows: Iterator[Row]) -> int:
    """Return the peak growth of the heap while timesteps arrive.

    The temporary memory of concatenation is not counted, in favour of the lists.
    """
    before = most = heap_bytes()

    def watched() -> Iterator[Row]:
        nonlocal most
        for row in rows:
            yield row
            most = max(most, heap_bytes())

    way(watched())
    return most - before


def compare_backends(args: argparse.Namespace) -> None:
    """Print steps per second of every backend, with random actions."""
    print(f"| environment | envs | {' | '.join(BACKENDS)} |")
    print(f"|---|---:|{'---:|' * len(BACKENDS)}")
    for preset in args.presets:
        for count in args.envs:
            values: Any = OmegaConf.to_container(OmegaConf.load(PRESET_FOLDER / f"{preset}.yaml"))
            _compare_backends(EnvSettings(**values | {"num_envs": count}), preset, args)


def _compare_backends(settings: EnvSettings, preset: str, args: argparse.Namespace) -> None:
    rows = max(1, args.steps // settings.num_envs)
    with ExitStack() as stack:
        contestants: dict[str, Callable[[], object]] = {}
        for backend in BACKENDS:
            with suppress(SettingError):  # no such backend, or not installed
                env = stack.enter_context(build_env(replace(settings, backend=backend), seed=0))
                env.reset()
                contestants[backend] = partial(_play, env, _any_actions(env.spec, rows))
        seconds = take_turns(contestants, rounds=args.rounds, calls=1)
    cells = [
        f"{rows * settings.num_envs / median(seconds[name]):,.0f}" if name in seconds else ""
        for name in BACKENDS
    ]
    print(f"| {preset} | {settings.num_envs} | {' | '.join(cells)} |", flush=True)


def _play(env: VectorEnv, actions: NDArray) -> None:
    for action in actions:
        env.step(action)


def _any_actions(spec: EnvSpec, rows: int) -> NDArray:
    random, shape = np.random.default_rng(0), (rows, spec.num_envs)
    if isinstance(spec.action, BoxActions):
        low, high = spec.action.low, spec.action.high
        return random.uniform(low, high, (*shape, len(low))).astype(np.float32)
    assert isinstance(spec.action, DiscreteActions)
    return random.integers(0, spec.action.n, shape)
