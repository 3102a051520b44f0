"""Compare default settings with Stable-Baselines3's: a line for each run in a data file.

A run that has a line is not run again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from itertools import product
from pathlib import Path

from scripts.benchmarks.machinery import ROOT, commit, processor
from scripts.benchmarks.peers import SB3
from scripts.benchmarks.race import OURS, contestants
from scripts.benchmarks.results import lines
from steadyrl.agents.registry import ALGORITHMS
from steadyrl.core.errors import SettingError
from steadyrl.training.run.job import accept, compose_one

DATA = ROOT / "docs" / "data" / "defaults.jsonl"
# Environments, each with thousands of steps: those that other defaults of ours were tried on …
# (Returns of Asterix are near 1 and spread as much: 20 episodes are too few.)
CHOSEN_ON = """cartpole=50 acrobot=50 mountaincar=100 mountaincar_continuous=50 pendulum=100
 frozenlake=50 cliffwalking=50 taxi=50 lunarlander=100 minatar_breakout=150
 minatar_asterix,eval.episodes=200=150 hopper=150 frozenlake,+env.kwargs.map_name=8x8=100
 minatar_freeway=150 lunarlander_continuous=100 swimmer=100 halfcheetah=150 walker2d=150
 reacher=100 inverteddoublependulum=100 ant=150"""
# … and held-out ones: of a preset, or by Gymnasium's id.
HELD_OUT = """minatar_spaceinvaders=150 minatar_seaquest=150 invertedpendulum=50
 pusher=100 humanoid=150 bipedalwalker=150 HumanoidStandup-v5=150
 flappy_bird_gymnasium:FlappyBird-v0,+env.kwargs.use_lidar=false=150"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `defaults` to the benchmark command."""
    parser = subparsers.add_parser("defaults", help=str(__doc__).splitlines()[0])
    parser.add_argument("envs", nargs="*", default=f"{CHOSEN_ON} {HELD_OUT}".split())
    parser.add_argument("--agents", nargs="*", default=[*ALGORITHMS])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[OURS, SB3], help="contestants")
    parser.add_argument("--data", type=Path, default=DATA, help="file that lines are added to")
    parser.set_defaults(run=defaults)


def defaults(args: argparse.Namespace) -> None:
    """Run each contestant that has no line, and add one with its score."""
    for each, agent in product(args.envs, args.agents):
        env, _, thousands = each.rpartition("=")
        chosen = "env.id" if re.search(r"-v\d", env) else "env"
        arguments = [f"agent={agent}", *f"{chosen}={env}".split(","), f"total_steps={thousands}000"]
        try:
            settings = accept(compose_one(arguments), arguments).settings
        except SettingError as error:  # DQN with continuous actions, or a missing extra
            print(f"left out: {error}")
            continue
        field = contestants(arguments, settings, nothing_more=True)
        for name, seed in product((name for name in field if name in args.only), range(args.seeds)):
            run = {"environment": env, "agent": agent, "by": name, "seed": seed}
            run["steps"] = settings.run.total_steps
            if any(run.items() <= line.items() for line in lines(args.data)):
                continue
            seconds, score = field[name](seed)
            run |= {
                "score": round(score, 3),
                "seconds": round(seconds, 1),
                "chosen_on": each in CHOSEN_ON.split(),
                "processor": processor(),
                "date": datetime.date.today().isoformat(),
                "commit": commit(),
                "command": f"python scripts/benchmark.py defaults {each} --agents {agent} "
                f"--only {name} --seeds {seed + 1}",
            }
            with args.data.open("a") as file:
                file.write(json.dumps(run) + "\n")
            print(
                f"{agent} {env} {name} seed {seed}: {score:.1f} after {seconds:.0f} s", flush=True
            )
