"""Benchmark this program on this machine, against other libraries if they are installed.

    taskset -c 0 python scripts/benchmark.py replay

Install the peers with `pip install -e ".[peers]"`. Contestants run alternately in one process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.benchmarks import (
    agents,
    defaults,
    growth,
    machinery,
    race,
    replay,
    results,
    rollout,
    watch,
)
from scripts.benchmarks.measuring import median_ratio, take_turns
from steadyrl.agents.engine.graphs.graph_cache import host_code
from steadyrl.agents.engine.graphs.trace import trace
from steadyrl.agents.engine.graphs.wide_products import faster_here

# One module per topic; each has add_parser(subparsers), which registers its benchmarks.
MODULES = (agents, race, defaults, replay, rollout, growth, watch, machinery, results)

# Starts like train.py, and prints the cost of each phase.
PROBE = """
import sys, time
begin = time.perf_counter()
import psutil
marks = []
def mark(part):
    this = psutil.Process()
    workers = [each.memory_full_info().uss / 1e6 for each in this.children(recursive=True)]
    marks.append((part, time.perf_counter() - begin, time.process_time(),
                  this.memory_info().rss / 1e6, read_peak() / 1e6, max(workers, default=0)))
from steadyrl.memory.process import read_peak
from steadyrl.training.run.job import accept, compose_one
job = accept(compose_one(sys.argv[1:]), sys.argv[1:])
mark("accept the configuration")
import torch
mark("import torch")
from scripts.benchmarks.measuring import BlocksUntil
from steadyrl.loop import loop
from steadyrl.training.run.collector import build_collector
from steadyrl.training.setup import open_run
mark("import the program")
with open_run(job) as (run, env, agent):
    mark("open the run")
    collector = build_collector(run, env, agent)
    collector.run = BlocksUntil(run, 1)
    run.on_steps(collector.collect())
    collector.run = run
    mark("the first step")
    loop(run, collector)
    mark("5,000 steps")
for part in marks:
    print("MARK", *part, sep="|")
"""

# (rows, inner, columns) of matrix products: PPO's layers, DQN's, and those after a CNN.
SIZES = (
    (256, 64, 64),
    (64, 256, 64),
    (128, 120, 84),
    (128, 256, 256),
    (8192, 36, 16),
    (256, 1024, 128),
    (256, 3136, 512),
)
OURS, TORCH, ONEDNN = "in graphs", "torch", "oneDNN"
SIDE_BY_SIDE = 8  # products per graph: passing one its inputs costs as much as a small product
WORK = 30_000_000  # multiplications per turn, at least


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run one benchmark."""
    description = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=description)
    subparsers = parser.add_subparsers(required=True, metavar="benchmark")
    for module in MODULES:
        module.add_parser(subparsers)
    own = subparsers.add_parser("startup", help=str(startup.__doc__).splitlines()[0])
    own.add_argument("--rounds", type=int, default=7)
    own.add_argument("overrides", nargs="*", default=["env=cartpole"])
    own.set_defaults(run=startup)
    own = subparsers.add_parser("products", help=products.__doc__)
    own.add_argument("--rounds", type=int, default=15)
    own.set_defaults(run=products)
    args = parser.parse_args(arguments)
    args.run(args)


def startup(args: argparse.Namespace) -> None:
    """Measure time and memory of a fresh process, phase by phase up to 5,000 steps.

    The last column is the USS of the largest environment worker.
    """
    rounds = [_started(args.overrides) for _ in range(args.rounds + 1)][1:]
    print("| phase | seconds | CPU seconds | RSS, MB | peak RSS, MB | worker USS, MB |")
    print("|---|---:|---:|---:|---:|---:|")
    for marks in zip(*rounds, strict=True):
        columns = zip(*(numbers for _, numbers in marks), strict=True)
        seconds, busy, *sizes = (median(column) for column in columns)
        megabytes = " | ".join(f"{size:.0f}" for size in sizes)
        print(f"| {marks[0][0]} | {seconds:.2f} | {busy:.2f} | {megabytes} |")


def _started(overrides: Sequence[str]) -> list[tuple[str, list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (
            *overrides,
            "total_steps=5000",
            "threads=1",
            "device=cpu",
            f"run_dir={folder}/run",
        )
        _, printed = race.timed([sys.executable, "-c", PROBE, *arguments])
    lines = [text.split("|") for text in printed.splitlines() if text.startswith("MARK|")]
    return [(part, [float(number) for number in numbers]) for _, part, *numbers in lines]


def products(args: argparse.Namespace) -> None:
    """Print a Markdown table: time of a matrix product, weights row-major and transposed."""
    torch.set_num_threads(1)
    if not faster_here():
        print("compiled graphs use torch's own matrix products on this CPU\n")
    print(
        "| rows, inner, columns | library | µs | GFLOP/s | time / ours |\n|---|---|---:|---:|---:|"
    )
    for size in SIZES:
        rows, inner, columns = size
        for turned in ("", ", turned"):
            left = torch.randn(SIDE_BY_SIDE, rows, inner)
            right = torch.randn(SIDE_BY_SIDE, inner, columns)
            if turned:
                right = right.mT.contiguous().mT
            multiplications = SIDE_BY_SIDE * rows * inner * columns
            seconds = take_turns(
                multipliers(left, right),
                rounds=args.rounds,
                calls=-(-WORK // multiplications),
            )
            for way, times in seconds.items():
                speed = 2 * multiplications / median(times) / 1e9
                each = 1e6 * median(times) / SIDE_BY_SIDE
                ratio = median_ratio(times, seconds[OURS])
                print(
                    f"| {rows}, {inner}, {columns}{turned} | {way} | {each:.1f} | {speed:.0f} ",
                    end="",
                )
                print(f"| {ratio:.2f} |")


def multipliers(left: Tensor, right: Tensor) -> Mapping[str, Callable[[], list[Tensor]]]:
    """Return the implementations of products of matrices [B, …]; all return the same."""
    lefts, rights = left.unbind(), right.unbind()
    turned = tuple(each.t() for each in rights)
    graph, captured = trace(lambda *both: tuple(map(torch.mm, *both)), (lefts, rights))
    run = host_code(graph, [*lefts, *rights, *captured])
    onednn = torch.ops.mkldnn._linear_pointwise
    ways: dict[str, Callable[[], list[Tensor]]] = {
        OURS: lambda: run([*lefts, *rights]),
        TORCH: lambda: list(map(torch.mm, lefts, rights)),
    }
    if torch.backends.mkldnn.is_available():
        ways[ONEDNN] = lambda: [
            onednn(one, other, None, "none", [], "")
            for one, other in zip(lefts, turned, strict=True)
        ]
    return ways


if __name__ == "__main__":
    main()
