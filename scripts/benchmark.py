"""Measure this program on the machine at hand, beside others where they are installed.

    taskset -c 0 python scripts/benchmark.py replay

Peers come with `pip install -e ".[peers]"`. All contestants run in one process, in turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.benchmarks import agents, growth, race, replay, rollout, watch

# One module an idea; each brings add_parser(subparsers), which says what to run.
MODULES = (agents, race, replay, rollout, growth, watch)


# A program that starts as train.py does, and says what it has cost where.
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
from memory.process import read_peak
from training.command_line import accept, compose_one
job = accept(compose_one(sys.argv[1:]), sys.argv[1:])
mark("accept the configuration")
import torch
mark("import torch")
from train import loop
from training.opening import open_run
mark("import the program")
with open_run(job) as (run, env, agent):
    mark("open the run")
    actor = agent.actor(env.spec.num_envs, explore=True)
    decision = actor.act(env.observation, env.starts)
    env.send(decision.action.numpy(force=True))
    agent.observe(decision, env.receive())
    mark("the first step")
    loop(run, env, agent, actor)
    mark("5,000 steps")
for part in marks:
    print("MARK", *part, sep="|")
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and run one benchmark."""
    description = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=description)
    subparsers = parser.add_subparsers(required=True, metavar="benchmark")
    for module in MODULES:
        module.add_parser(subparsers)
    own = subparsers.add_parser("startup", help=str(startup.__doc__).splitlines()[0])
    own.add_argument("--rounds", type=int, default=7)
    own.add_argument("overrides", nargs="*", default=["env=cartpole"])
    own.set_defaults(run=startup)
    args = parser.parse_args(arguments)
    args.run(args)


def startup(args: argparse.Namespace) -> None:
    """Time a fresh process up to its first step, and say what it has resident, then and later.

    In the last column what the largest of the environments' workers shares with nobody.
    """
    rounds = [_started(args.overrides) for _ in range(args.rounds + 1)][1:]
    print("| until it has done this | seconds | on the CPU | resident MB | at most | of a worker |")
    print("|---|---:|---:|---:|---:|---:|")
    for marks in zip(*rounds, strict=True):
        columns = zip(*(numbers for _, numbers in marks), strict=True)
        seconds, busy, *sizes = (median(column) for column in columns)
        megabytes = " | ".join(f"{size:.0f}" for size in sizes)
        print(f"| {marks[0][0]} | {seconds:.2f} | {busy:.2f} | {megabytes} |")


def _started(overrides: Sequence[str]) -> list[tuple[str, list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        told = (*overrides, "total_steps=5000", "threads=1", "device=cpu", f"run_dir={folder}/run")
        _, printed = race.timed([sys.executable, "-c", PROBE, *told])
    lines = [text.split("|") for text in printed.splitlines() if text.startswith("MARK|")]
    return [(part, [float(number) for number in numbers]) for _, part, *numbers in lines]


if __name__ == "__main__":
    main()
