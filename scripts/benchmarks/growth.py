"""Memory growth: of stored losses, and of a run's iterations on any device."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from scripts.benchmarks.measuring import Ours

WARMUP_CYCLES = 2


class Growth(NamedTuple):
    """Resident bytes added per cycle, and live tensors with a graph at the end."""

    bytes_per_cycle: float
    graphs: int


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `graph_leak` and `card` to the benchmark command."""
    card = subparsers.add_parser(
        "card", help="speed, memory and synchronisations of a run on any device"
    )
    card.add_argument("overrides", nargs="+", help="overrides of the run: agent=ppo device=cuda …")
    card.add_argument("--name", default="", help="name printed in the table's row")
    card.add_argument(
        "--iterations", type=int, default=1000, help="rollouts (PPO) or updates (DQN)"
    )
    card.set_defaults(run=run_card)
    parser = subparsers.add_parser("graph_leak", help="memory cost of storing losses")
    parser.add_argument("--losses", type=int, default=3_072, help="losses per cycle")
    parser.add_argument("--cycles", type=int, default=5, help="cycles after the warm-up")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print a Markdown table, one row per way of storing losses."""
    print(f"{args.losses:,} losses per cycle, MLP 4-120-84-2, batch 32, {args.cycles} cycles")
    print()
    print("| stored per loss | growth per cycle | per loss | tensors with a graph |")
    print("|---|---:|---:|---:|")
    for name in WAYS:
        growth = measure(name, args.losses, args.cycles)
        print(
            f"| {name} | {growth.bytes_per_cycle / 1e3:,.1f} KB "
            f"| {growth.bytes_per_cycle / args.losses:,.1f} B | {growth.graphs:,} |",
            flush=True,
        )


def measure(name: str, losses: int, cycles: int) -> Growth:
    """Measure one way in its own process: memory freed by another would hide growth."""
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

    from steadyrl.memory.process import read_rss
    from steadyrl.memory.tensors import live_tensors

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
    """A way of storing losses; by default none is stored."""

    def __init__(self) -> None:
        self.losses: list[object] = []

    def before_backward(self, loss: object) -> bool:
        """Receive the loss as computed; return True to skip its update."""
        return False

    def after_backward(self, loss: object) -> None:
        """Receive the loss after the update."""

    def end_of_cycle(self) -> None:
        """Log what was stored."""


class _Graphs(Keep):
    def before_backward(self, loss: object) -> bool:
        self.losses.append(loss)
        return True


class _Losses(Keep):
    def after_backward(self, loss: object) -> None:
        self.losses.append(loss)


class _Recorded(Keep):
    def __init__(self) -> None:
        from steadyrl.core.history import History
        from steadyrl.core.metrics import MetricAccumulator

        self.metrics, self.means = MetricAccumulator(), History(1000)

    def after_backward(self, loss: object) -> None:
        import torch

        from steadyrl.core.metrics import record

        assert isinstance(loss, torch.Tensor)
        self.metrics.add(record(["train/loss"], loss))

    def end_of_cycle(self) -> None:
        self.means.append(self.metrics.flush()["train/loss"])


WAYS: dict[str, Callable[[], Keep]] = {
    "the loss with its graph, without an update": _Graphs,
    "the loss after `backward()`": _Losses,
    "recorded metrics, summed (`steadyrl.core.metrics`)": _Recorded,
    "nothing": Keep,
}

FIRST = 10  # iterations after which memory must be constant
TRACED = 3
# Profiler events in which the host waits; `item` costs nothing on a CPU.
WAITS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    *("aten::_local_scalar_dense", "aten::nonzero"),
)


def run_card(args: argparse.Namespace) -> None:
    """Print a Markdown row: speed, memory after 10 and after all iterations, synchronisations."""
    from scripts.benchmarks.measuring import ours

    with ours("total_steps=1e9", "eval.every=0", "log.every=0", *args.overrides) as one:
        agent: Any = one.agent
        settings = agent._settings
        steps = getattr(settings, "train_every", 0)
        steps = steps or settings.rollout_steps * one.env.spec.num_envs
        one.train(getattr(settings, "learning_starts", 0) + FIRST * steps)
        device = next(iter(one.agent.weights().values())).device
        before, first = allocated_bytes(device), one.agent.updates
        begin = time.perf_counter()
        one.train((args.iterations - FIRST) * steps)
        after = allocated_bytes(device)  # also synchronises the device
        seconds = time.perf_counter() - begin
        steps_done, updates = (args.iterations - FIRST) * steps, one.agent.updates - first
        found = waits_in_updates(one, TRACED * steps)
    listed = ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "none"
    print(
        f"| {args.name} | {device.type} | {steps_done / seconds:,.0f} | {updates / seconds:,.0f} "
        f"| {before / 1e6:,.1f} | {after / 1e6:,.1f} | {listed} |"
    )


def allocated_bytes(device: torch.device) -> int:
    """Return allocated bytes of a GPU, or this process's RSS."""
    import psutil
    import torch

    from steadyrl.memory.process import read_rss

    gc.collect()
    if device.type != "cuda":
        return read_rss(psutil.Process())
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def waits_in_updates(one: Ours, steps: int) -> Counter[str]:
    """Train under the profiler; return the count of each blocking call within updates."""
    from torch.profiler import profile, record_function

    update = one.agent.update

    def marked() -> Any:
        with record_function("an update"):
            return update()

    agent: Any = one.agent
    agent.update = marked
    try:
        with profile() as trace:
            one.train(steps)
    finally:
        del agent.update
    spans = [e.time_range for e in trace.events() or () if e.name == "an update"]
    return Counter(
        event.name
        for event in trace.events() or ()
        if event.name in WAITS and any(s.start <= event.time_range.start <= s.end for s in spans)
    )
