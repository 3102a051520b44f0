"""What each piece of machinery is worth: whole training runs with one of them switched off.

Runs with and without it alternate. What is worth less than 1.05 of a whole run everywhere is
removed; what is worth less than 1.15 stays only if that saves few lines and no private name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch

from steadyrl.training.cli.checks.machine import cpu_info

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "data" / "machinery.jsonl"

# Whole runs: shortened presets, two of them compiled, one on Gymnasium's own environments.
RUNS = {
    "CartPole PPO": ("experiment=cartpole_ppo",),
    "Pendulum PPO": ("experiment=pendulum_ppo",),
    "CartPole DQN": ("experiment=cartpole_dqn", "total_steps=30_000"),
    "CartPole PPO, compiled": ("experiment=cartpole_ppo", "agent.compile=true"),
    "Acrobot DQN, compiled": ("experiment=acrobot_dqn", "total_steps=40_000", "agent.compile=true"),
    "MinAtar PPO, compiled": (
        "experiment=minatar_breakout_ppo",
        "total_steps=200_000",
        *("agent.minibatches=4", "agent.epochs=4", "agent.compile=true"),
    ),
    "CartPole PPO, 4 epochs, compiled": (
        "experiment=cartpole_ppo",
        "total_steps=500_000",
        *("agent.rollout_steps=128", "agent.epochs=4", "agent.compile=true"),
    ),
    "CartPole PPO, sync": ("experiment=cartpole_ppo", "env.backend=sync"),
}
PPO, PENDULUM, DQN, PPO_COMPILED, DQN_COMPILED, MINATAR, FEW_EPOCHS, SYNC = RUNS
COMPILED = (PPO_COMPILED, DQN_COMPILED, MINATAR)
COMMON = ("threads=1", "device=cpu", "eval.every=1e9")

# A run in a process of its own: without the piece that is named first.
CHILD = """
import resource, sys
from scripts.benchmarks.machinery import switch_off
from steadyrl.loop import command
_, name, sys.argv[1:] = sys.argv[0], sys.argv[1], sys.argv[2:]
switch_off(name)
try:
    command()
finally:
    print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


AGENTS = "steadyrl.agents"
ENGINE = f"{AGENTS}.engine"


def _reference_step(self: Any, parts: Any) -> Any:
    from steadyrl.agents.engine.eager import EagerStep

    return EagerStep(parts)


def _trace_by_torch(function: Any, args: Any, only_read: Any = ()) -> Any:
    """Trace as `agents/engine/graphs/trace.py` does, by torch's own tracer."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from steadyrl.agents.engine.graphs.patches import Patches
    from steadyrl.agents.engine.graphs.trace import rebuild, rewritten_by
    from steadyrl.agents.networks.activations import tracing
    from steadyrl.core.cuda_graph import flatten

    copies = [leaf.detach().clone() for leaf in flatten(args)]
    with tracing():
        traced = make_fx(
            lambda *leaves: function(*rebuild(leaves, args)),
            decomposition_table=rewritten_by(Patches()),
        )
        return traced(*copies), []


def _load_with_compiler(library: Path) -> Any:
    """Load a graph as torch's public `aoti_load_package` does: with the compiler in memory."""
    import torch._inductor.package  # what takes the time

    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1).run


class Piece(NamedTuple):
    """What replaces a piece, by the path of a name, and the runs that it is for."""

    replaced: dict[str, Any]
    runs: tuple[str, ...]


PIECES = {
    "the direct step": Piece(
        {f"{ENGINE}.direct.DirectEngine.train_step": _reference_step}, (PPO, PENDULUM, DQN)
    ),
    "backward without torch's checks": Piece(
        {f"{ENGINE}.direct.run_backward": lambda: None}, (PPO, DQN)
    ),
    "Adam by its operator": Piece({f"{ENGINE}.direct.fused_adam": lambda: None}, (PPO, DQN)),
    "PPO's last values in machine code": Piece(
        {f"{AGENTS}.ppo.advantages.value_on_host": lambda network: None},
        (PPO_COMPILED, FEW_EPOCHS),
    ),
    "networks in machine code": Piece(
        {f"{ENGINE}.cpu.policy.acts_in_machine_code": lambda: False}, (PPO, DQN, SYNC)
    ),
    "fused rollouts": Piece(
        {f"{ENGINE}.direct.DirectEngine.collector": lambda self, build: None},
        (PPO, PENDULUM, DQN, PPO_COMPILED, FEW_EPOCHS),
    ),
    "its own tracer": Piece({f"{ENGINE}.graphs.trace.trace": _trace_by_torch}, COMPILED),
    "compiled graphs cached on disk": Piece(
        {f"{ENGINE}.graphs.graph_cache.is_private": lambda path: False}, COMPILED
    ),
    "graphs loaded without the compiler": Piece(
        {f"{ENGINE}.graphs.graph_cache._load": _load_with_compiler}, COMPILED
    ),
    "its own products": Piece(
        {f"{ENGINE}.graphs.wide_products.faster_here": lambda: False}, COMPILED
    ),
    "convolutions by patches": Piece(
        {f"{ENGINE}.graphs.patches.Patches._is_supported": lambda *given: False}, (MINATAR,)
    ),
}


def switch_off(name: str) -> None:
    """Do without a piece in this process; "": with all."""
    for path, instead in PIECES[name].replaced.items() if name else ():
        mock.patch(path, instead).start()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `machinery` to the benchmark command."""
    parser = subparsers.add_parser("machinery", help="whole runs without one piece of machinery")
    parser.add_argument("pieces", nargs="*", default=[*PIECES], help="pieces, by their names")
    parser.add_argument("--runs", nargs="*", default=[*RUNS], help="training runs, by their names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"add lines to {DATA.name}")
    parser.set_defaults(run=machinery)


def machinery(args: argparse.Namespace) -> None:
    """Print seconds, CPU seconds and peak memory without each piece, against a run with all."""
    print("| run | without | times as long | CPU | peak RSS, MB | seconds with all |")
    print("|---|---|---:|---:|---:|---:|")
    for run in args.runs:
        for name in (name for name in args.pieces if run in PIECES[name].runs):
            for each in ("", name):  # fills the caches of compiled code
                once(each, (*RUNS[run], "total_steps=10_000"))
            pairs = [turns(name, RUNS[run], place % 2) for place in range(args.rounds)]
            found = measured(run, name, pairs)
            print(line(found), flush=True)
            if args.write:
                with DATA.open("a") as file:
                    file.write(json.dumps(found) + "\n")


def turns(name: str, overrides: Sequence[str], second: int) -> tuple[Spent, Spent]:
    """Return a run without a piece and one with all; which comes first alternates."""
    spent = {each: once(each, overrides) for each in (("", name), (name, ""))[second]}
    return spent[name], spent[""]


class Spent(NamedTuple):
    """What a run took."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def once(name: str, overrides: Sequence[str]) -> Spent:
    """Train in a process of its own without a piece."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CHILD, name, *overrides, *COMMON, f"run_dir={folder}/run"]
        before, begin = _cpu_seconds(), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        seconds, busy = time.perf_counter() - begin, _cpu_seconds() - before
    if done.returncode:
        raise SystemExit(f"{name} {' '.join(overrides)}\n{done.stdout}{done.stderr}")
    peak = float(done.stdout.rpartition("PEAK ")[2])
    return Spent(seconds, busy, peak)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(run: str, name: str, pairs: Sequence[tuple[Spent, Spent]]) -> dict[str, Any]:
    """Return medians over rounds of a run without a piece against the same run with all."""
    return {
        "run": run,
        "without": name,
        "ratio": round(median(one.seconds / two.seconds for one, two in pairs), 3),
        "cpu_ratio": round(median(one.cpu_seconds / two.cpu_seconds for one, two in pairs), 3),
        "peak_mb": round(median(one.peak_mb - two.peak_mb for one, two in pairs)),
        "seconds": round(median(two.seconds for _, two in pairs), 1),
        "rounds": len(pairs),
        "processor": processor(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": "taskset -c 0 python scripts/benchmark.py machinery",
    }


def commit() -> str:
    """Return the checkout's short commit, with a + if files beside the pages have changed since."""
    command = ("git", "rev-parse", "--short=7", "HEAD")
    head = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    changes = ("git", "diff", "--quiet", "HEAD", "--", ".", ":!docs")
    return head + ("+" if subprocess.run(changes, cwd=ROOT).returncode else "")


def processor() -> str:
    """Return this processor's name and whether it is AMD's with AVX-512."""
    return f"{cpu_info()[0]}, {torch.backends.cpu.get_cpu_capability()}"


def line(found: dict[str, Any]) -> str:
    """Return a line of the table."""
    names = ("run", "without", "ratio", "cpu_ratio", "peak_mb", "seconds")
    return f"| {' | '.join(str(found[name]) for name in names)} |"
