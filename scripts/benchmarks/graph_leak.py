"""What it costs to keep losses: with their graph, after backward, and as recorded metrics."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

WARMUP_CYCLES = 2


class Growth(NamedTuple):
    """Resident bytes taken per cycle, and the tensors with a graph alive at the end."""

    bytes_per_cycle: float
    graphs: int


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `graph_leak` to the benchmark command."""
    parser = subparsers.add_parser("graph_leak", help=__doc__)
    parser.add_argument("--losses", type=int, default=3_072, help="losses per cycle")
    parser.add_argument("--cycles", type=int, default=5, help="cycles after the warm-up")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print a Markdown table, one row per way of keeping losses."""
    print(f"{args.losses:,} losses per cycle, MLP 4-120-84-2, batch 32, {args.cycles} cycles")
    print()
    print("| what is kept of each loss | growth per cycle | per loss | tensors with a graph |")
    print("|---|---:|---:|---:|")
    for name in WAYS:
        growth = measure(name, args.losses, args.cycles)
        print(
            f"| {name} | {growth.bytes_per_cycle / 1e3:,.1f} KB "
            f"| {growth.bytes_per_cycle / args.losses:,.1f} B | {growth.graphs:,} |",
            flush=True,
        )


def measure(name: str, losses: int, cycles: int) -> Growth:
    """Measure one way in a process of its own: what another one freed would hide its growth."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, name, losses, cycles))
    process.start()
    theirs.close()
    growth: Growth = ours.recv()
    process.join()
    return growth


def _measure(pipe: Connection, name: str, losses: int, cycles: int) -> None:
    import psutil
    import torch

    from memory.process import read_rss
    from memory.tensors import live_tensors

    torch.set_num_threads(1)
    process = psutil.Process()
    keep = WAYS[name]()
    cycle = _make_cycle(losses)
    sizes = []
    for _ in range(WARMUP_CYCLES + cycles + 1):
        cycle(keep)
        gc.collect()
        sizes.append(read_rss(process))
    grown = [after - before for before, after in pairwise(sizes)]
    graphs = sum(n for kind, n in live_tensors().kinds.items() if kind.has_graph)
    pipe.send(Growth(median(grown[WARMUP_CYCLES:]), graphs))


def _make_cycle(losses: int) -> Callable[[Keep], None]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, fused=True)
    inputs, targets = torch.randn(32, 4), torch.randn(32, 2)

    def cycle(keep: Keep) -> None:
        for _ in range(losses):
            loss = (network(inputs) - targets).square().mean()
            if not keep.before_backward(loss):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                keep.after_backward(loss)
        keep.end_of_cycle()

    return cycle


class Keep:
    """A way of keeping losses; by default nothing is kept."""

    def before_backward(self, loss: object) -> bool:
        """Take the loss as it is computed; True says that it will not be learned from."""
        return False

    def after_backward(self, loss: object) -> None:
        """Take the loss after the update."""

    def end_of_cycle(self) -> None:
        """Log what was kept."""


class _Graphs(Keep):
    def __init__(self) -> None:
        self.losses: list[object] = []

    def before_backward(self, loss: object) -> bool:
        self.losses.append(loss)
        return True


class _Losses(Keep):
    def __init__(self) -> None:
        self.losses: list[object] = []

    def after_backward(self, loss: object) -> None:
        self.losses.append(loss)


class _Recorded(Keep):
    def __init__(self) -> None:
        from memory.history import History
        from memory.metrics import MetricAccumulator

        self.metrics, self.means = MetricAccumulator(), History(1000)

    def after_backward(self, loss: object) -> None:
        import torch

        from memory.metrics import record

        assert isinstance(loss, torch.Tensor)
        self.metrics.add(record(["train/loss"], loss))

    def end_of_cycle(self) -> None:
        self.means.append(self.metrics.flush()["train/loss"])


WAYS: dict[str, Callable[[], Keep]] = {
    "the loss with its graph, not learned from": _Graphs,
    "the loss after `backward()`": _Losses,
    "a recorded metric (`memory.metrics`)": _Recorded,
    "nothing": Keep,
}
