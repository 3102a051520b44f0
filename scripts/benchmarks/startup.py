"""Start-up: a fresh process imports the replay and runs every kernel of it once, cache warm."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import time
def now(): return np.array((time.perf_counter(), time.process_time()))
import numpy as np
start = now()
import torch
torch_there = now()
from buffers.replay import build_replay
from buffers.settings import ReplaySettings
settings = ReplaySettings(
    capacity=1000, prioritized=True, alpha=0.6, beta_start=0.4, beta_end=1.0, device="cpu"
)
replay = build_replay(
    settings, frame_shape=(8,), dtype="float32", frame_stack=1, num_envs=1, n_step=3, gamma=0.99,
    device=torch.device("cpu"), seed=0,
)
obs, no = np.zeros((1, 8), np.float32), np.zeros(1, np.bool_)
replay.start(obs)
for _ in range(5):
    replay.add(np.zeros(1, np.int64), np.zeros(1, np.float32), no, no, ~no, obs)
replay.update_priorities(replay.sample(2).index, torch.zeros(2))
print(*(torch_there - start), *(now() - torch_there))
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `startup` to the benchmark command."""
    parser = subparsers.add_parser("startup", help=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print medians over fresh processes; the first, which may compile, is thrown away."""
    times = [measure() for _ in range(args.rounds + 1)][1:]
    torch_wall, torch_busy, wall, busy = (median(column) for column in zip(*times, strict=True))
    print("| part | seconds | on the CPU |")
    print("|---|---:|---:|")
    print(f"| import torch | {torch_wall:.2f} | {torch_busy:.2f} |")
    print(f"| import the replay, first call of every kernel | {wall:.2f} | {busy:.2f} |")
    print(f"| together | {torch_wall + wall:.2f} | {torch_busy + busy:.2f} |")


def measure() -> list[float]:
    """Return seconds that passed and on the CPU of a fresh process: for torch, for the rest."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]
