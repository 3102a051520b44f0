"""Prioritised replay: one add + sample + priority update, beside cpprb and Tianshou."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from statistics import median

import torch

from scripts.benchmarks.replay_peers import Cycle, cpprb, make_data, ours, tianshou
from scripts.benchmarks.turns import median_ratio, take_turns

OURS = "SteadyRL, n-step {}"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `replay` to the benchmark command."""
    parser = subparsers.add_parser("replay", help=__doc__)
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=1_000_000)
    parser.add_argument("--size", type=int, default=8, help="floats in an observation")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--n-steps", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cycles", type=int, default=300, help="cycles a round")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print a Markdown table: medians over rounds, ratios to the longest n-step of ours."""
    torch.set_num_threads(1)
    data = make_data(args.rows, args.size)
    replays: dict[str, Cycle] = {OURS.format(n): ours(data, n) for n in args.n_steps}
    for name, module, build in (("cpprb", "cpprb", cpprb), ("Tianshou", "tianshou", tianshou)):
        if find_spec(module):
            replays[name] = build(data)
        else:
            print(f'{name} is not installed: pip install -e ".[peers]"')
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
